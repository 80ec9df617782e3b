import json
import re
from pathlib import Path
from typing import Any

import pytest
from gym_kit.servers import ModelServer

from skyrl_gym.benchmarks.scores import estimate, score_benchmarks
from skyrl_gym.benchmarks.suite import BENCHMARKS, benchmark_rows
from skyrl_gym.cli import main
from skyrl_gym.envs import BUILT_IN, make, register
from skyrl_gym.envs.answer.env import AnswerEnv, grade_choice
from skyrl_gym.error import InvalidSettings


def sample(name: str, uid: str, *, passed: bool, error: str | None = None, reason: str = "stop") -> dict[str, Any]:
    return {"data_source": name, "uid": uid, "is_success": passed, "error": error, "stop_reason": reason}


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "ifeval"])
def test_samples_are_solved_by_their_answers_only(name: str) -> None:
    for row in benchmark_rows(f"{name}=sample"):
        truth = row["reward_spec"]["ground_truth"]
        wrong = "B" if truth == "A" else "A" if truth.isalpha() else "12345"
        rewards = [AnswerEnv({}, row).step(f"So it is \\boxed{{{answer}}}.")["reward"] for answer in (truth, wrong)]
        assert rewards == [1.0, 0.0]
        assert row["data_source"] == name


def test_samples_of_ifeval() -> None:
    register("ifeval", BUILT_IN["ifeval"])
    rows = list(benchmark_rows("ifeval=sample"))
    replies = ["the rhine and the nile and the elbe", "Salt. Much salt."]
    envs = [make("ifeval", env_config={}, extras=row) for row in rows]
    assert [env.step(reply)["reward"] for env, reply in zip(envs, replies, strict=True)] == [1.0, 1.0]
    assert [env.step("Salt, water")["reward"] for env in envs] == [0.0, 0.0]


def test_rows_of_files_and_their_mistakes(tmp_path: Path) -> None:
    raw = {"question": "2 + 2?", "answer": "It is 4.\n#### 4"}
    path = tmp_path / "raw.jsonl"
    path.write_text("\n".join(map(json.dumps, [raw, raw, {"question": "?"}])))
    assert len(list(benchmark_rows(f"gsm8k={path}", 2))) == 2
    with pytest.raises(ValueError, match=r"row 2 of .*: it has no column 'answer'; it needs the columns of open"):
        list(benchmark_rows(f"gsm8k={path}"))
    with pytest.raises(InvalidSettings, match="Did you mean 'gsm8k'"):
        list(benchmark_rows("gms8k"))
    with pytest.raises(InvalidSettings, match="use sample, or a file that ends in"):
        list(benchmark_rows("gsm8k=raw.csv"))


def test_choices_have_a_fixed_order_that_depends_on_the_question() -> None:
    rows = [list(benchmark_rows("gpqa=sample")) for _ in range(2)]
    assert rows[0] == rows[1]
    letters = {row["reward_spec"]["ground_truth"] for row in rows[0]}
    assert letters != {"A"}


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{c}", "C"),
        (r"\boxed{C. Jupiter}", "C"),
        (r"\boxed{A} is wrong, so \boxed{C}", "C"),
        ("Answer: **C**", "C"),
        ("<think>The answer is C.</think> The answer is (B).", "B"),
        (r"\boxed{C or D}", None),
        (r"\boxed{C, D}", None),
        (r"\boxed{(C) or (D)}", None),
        (r"\boxed{C. or D}", None),
        ("The answer is C or D.", None),
        ("The answer is Cat.", None),
        ("", None),
    ],
)
def test_letter_of_a_choice(reply: str, letter: str | None) -> None:
    grade = grade_choice(reply, "C")
    assert (grade.answer, grade.is_correct) == (letter, letter == "C")


@pytest.mark.parametrize("spec", [{"method": "maths"}, {"method": "choice", "ground_truth": "42"}])
def test_rows_that_cannot_be_graded_are_refused(spec: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AnswerEnv({}, {"reward_spec": {"ground_truth": "1", **spec}})


def test_intervals() -> None:
    """Published Wilson intervals for 8 of 10 and 0 of 10, and narrower ones if the problems agree."""
    eight, zero = estimate([1.0] * 8 + [0.0] * 2), estimate([0.0] * 10)
    assert (eight.low, eight.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert (zero.low, zero.high) == pytest.approx((0.0, 0.2775), abs=1e-4)
    coins, agreeing = estimate([0.0, 1.0] * 20), estimate([0.4, 0.6] * 20)
    assert agreeing.high - agreeing.low < (coins.high - coins.low) / 3


def test_scores_per_benchmark() -> None:
    samples = [
        *(sample("a", f"0_{i}", passed=i < 2) for i in range(4)),
        *(sample("a", f"1_{i}", passed=False, error="x", reason="length") for i in range(4)),
        sample("b", "5_0", passed=True),
    ]
    first, second = score_benchmarks(samples)
    assert (first.name, first.n_problems, first.n_samples, first.accuracy.mean) == ("a", 2, 4, 0.25)
    assert {k: score.mean for k, score in first.pass_at.items()} == pytest.approx({2: 5 / 12, 4: 0.5})
    assert (first.cut_off, first.failed) == (0.5, 0.5)
    assert (second.name, second.accuracy.mean, second.pass_at) == ("b", 1.0, {})


def test_a_model_behind_an_api(model_server: ModelServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Failed samples are wrong, and are played again by the next call, as is a sample that was cut off in the file."""
    register("answer", BUILT_IN["answer"])
    is_down = True

    def answer(messages: list[dict[str, Any]]) -> str | tuple[int, bytes]:
        text = messages[-1]["content"]
        if "boxes" in text and is_down:
            return 400, b"down"
        return r"\boxed{350}" if "train" in text else r"\boxed{19}"

    model_server.answer = answer
    output = tmp_path / "new" / "eval.jsonl"
    command = ["eval", "gsm8k=sample", "--base-url", model_server.url, "--model", "m", "--output", str(output)]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert re.search(r"gsm8k +3 +1 +33\.3% \(6\.1% to 79\.2%\) +0\.0% +33\.3%", printed.out)
    assert "1 of 3 samples failed; the first: the model 'm' at" in printed.err
    output.write_text(output.read_text()[:-20])
    is_down = False
    assert main(command) == 0
    assert "66.7%" in capsys.readouterr().out
    assert len(model_server.requests) == 5
    assert main(["eval", "math500=sample", *command[1:]]) == 0
    capsys.readouterr()
    assert len(model_server.requests) == 8, "the problems of gsm8k are known, whatever precedes them"
    assert main([*command, "--set", "temperature=1"]) == 2
    assert "set --output to another file" in capsys.readouterr().err
