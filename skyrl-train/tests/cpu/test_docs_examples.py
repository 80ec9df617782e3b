"""The code of the guides runs."""

import asyncio
import doctest
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from gym_kit.http_server import Request, chat_completion, serving
from train_kit.processes import run_python
from train_kit.runs import read_lines, train

from skyrl_gym.checkup.rules import Checkup
from skyrl_gym.envs.registration import EnvSpec
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, Registry
from skyrl_train.callbacks import StepReport
from skyrl_train.dataset.prompts import CustomDataset
from skyrl_train.entrypoints.main_base import BasePPOExp, parse_cli
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.rewards import REWARD_FUNCTIONS, RewardSample
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.trainer import Trainer
from skyrl_train.types import Segment, Trajectory, TrajectoryID

ROOT = Path(__file__).parents[3]
GUIDES = ROOT / "docs/guides"
ENVIRONMENTS, DATASETS, REWARDS = (GUIDES / f"{name}.md" for name in ("environments", "datasets", "reward-functions"))
CONCEPTS = ROOT / "docs/start/concepts.md"
EXTENDING, CUSTOM_ALGORITHMS = GUIDES / "extending.md", GUIDES / "custom-algorithms.md"
REGISTRIES: tuple[Registry, ...] = (ADVANTAGE_ESTIMATORS, POLICY_LOSSES)


def python_blocks(page: Path) -> list[str]:
    """Return the Python code blocks of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def names_of(page: Path) -> dict[str, Any]:
    """Run the Python code of a page and return its names. A block that starts with a file name is complete."""
    names: dict[str, Any] = {}
    for code in python_blocks(page):
        own = {} if re.match(r"# \w+\.py\b", code) else names
        exec(code, own)
        names |= own
    return names


def test_the_examples_of_the_concepts_print_what_the_page_shows() -> None:
    code = "\n".join(python_blocks(CONCEPTS))
    examples = doctest.DocTestParser().get_doctest(code, {}, CONCEPTS.stem, str(CONCEPTS), 0)
    assert doctest.DocTestRunner().run(examples) == (0, code.count(">>> "))


@pytest.fixture
def registered() -> Iterator[list[str]]:
    """Run the examples that register something; return the names of the estimators and losses."""
    before = [set(registry.list_available()) for registry in REGISTRIES]
    for code in [*python_blocks(CUSTOM_ALGORITHMS), *python_blocks(REWARDS)]:
        exec(code, {})
    added = [set(registry.list_available()) - names for registry, names in zip(REGISTRIES, before, strict=True)]
    yield [name for names in added for name in sorted(names)]
    del REWARD_FUNCTIONS["brevity"], REWARD_FUNCTIONS["polite"]
    for registry, names in zip(REGISTRIES, added, strict=True):
        for name in names:
            registry.unregister(name)


@pytest.mark.parametrize(
    ("loss", "metric"),
    [
        ("less_penalty", "policy/negative_tokens"),
        ("unclipped", "policy/policy_loss"),
        ("reduced", "policy/ppo_clip_ratio"),
    ],
)
def test_the_estimator_and_losses_of_the_page_train(
    registered: list[str], loss: str, metric: str, catch_run: list[str]
) -> None:
    estimator, *losses = registered
    assert loss in losses
    settings = [
        f"trainer.algorithm.advantage_estimator={estimator}",
        f"trainer.algorithm.policy_loss_type={loss}",
        "trainer.algorithm.custom.negative_weight=0.5",
        "generator.reward_functions=[brevity]",
        "generator.reward_weights.brevity=0.1",
        "trainer.policy_mini_batch_size=2",
        "trainer.max_training_steps=1",
        "trainer.eval_interval=-1",
    ]
    last = train(*catch_run, *settings).metrics[-1]
    assert last["step"] == 1
    assert abs(last[metric]) <= 1
    assert 0 < last["reward/component/brevity"] <= 1


class StoppableRun:
    """A run that records the reasons of stop requests."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def request_stop(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize(("score", "reasons"), [(0.96, ["the validation set is solved"]), (0.5, [])])
def test_the_callback_of_the_page_stops_a_solved_run(score: float, reasons: list[str], catch_run: list[str]) -> None:
    names: dict[str, Any] = {}
    exec(next(code for code in python_blocks(EXTENDING) if "class StopWhenSolved" in code), names)
    experiment = names["Experiment"](parse_cli(catch_run))
    with experiment.get_tracker() as tracker:
        callbacks = experiment.get_callbacks(experiment.get_eval_dataset(), GeneratorInterface(), tracker)
    kinds = [type(callback).__name__ for callback in callbacks]
    assert kinds[1:3] == ["Evaluation", "StopWhenSolved"]
    run = StoppableRun()
    asyncio.run(callbacks[2].on_step_end(run, StepReport(1, False, {"eval/all/avg_score": score})))
    assert run.reasons == reasons


def test_the_tracker_of_the_page_receives_every_step(catch_run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(next(code for code in python_blocks(EXTENDING) if "class Scoreboard" in code), names)
    names["Experiment"](parse_cli([*catch_run, "trainer.max_training_steps=2", "trainer.eval_interval=-1"])).run()
    assert re.search(r"\{1: -?[\d.]+, 2: -?[\d.]+\}", capsys.readouterr().out)


def test_the_trainer_of_the_page_changes_a_stage(catch_run: list[str], tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(next(code for code in python_blocks(EXTENDING) if "class PatientTrainer" in code), names)
    names["Experiment"](parse_cli([*catch_run, "trainer.max_training_steps=1", "trainer.eval_interval=-1"])).run()
    assert 0 <= read_lines(tmp_path / "skyrl/test_run/metrics.jsonl")[-1]["mine/long_share"] <= 1


def test_wrong_parts_of_a_run_are_refused_with_their_names(catch_run: list[str]) -> None:
    class Silent:
        def log(self, metrics: Any, step: int) -> None: ...

    class OwnTracker(BasePPOExp):
        def get_tracker(self) -> Any:
            return Silent()

    experiment = OwnTracker(parse_cli(catch_run))
    with pytest.raises(ConfigError, match=r"OwnTracker\.get_tracker\(\) returned a Silent; return the result of super"):
        experiment.open_tracker()
    missing = pytest.raises(ConfigError, match="the tracker Silent has no method truncate_after and no close")
    with BasePPOExp(parse_cli(catch_run)).get_tracker() as tracking, missing:
        tracking.add(Silent())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Late\.advantages must be defined with def, without async"):
        type("Late", (Trainer,), {"advantages": Trainer.score})
    with pytest.raises(TypeError, match=r"Early\.score must be defined with async def"):
        type("Early", (Trainer,), {"score": Trainer.advantages})


def test_the_environment_of_the_page_passes_the_checkup() -> None:
    (row,) = re.findall(r"```json\n(.*?)```", ENVIRONMENTS.read_text(encoding="utf-8"), re.DOTALL)
    findings = list(Checkup(EnvSpec("higher_lower", names_of(ENVIRONMENTS)["HigherLowerEnv"]), json.loads(row)).run())
    assert {finding.verdict for finding in findings} == {"passed"}
    assert f"my_module:HigherLowerEnv: {len(findings)} passed" in ENVIRONMENTS.read_text(encoding="utf-8")


def test_the_unit_tests_of_the_page_pass(tmp_path: Path) -> None:
    for code in python_blocks(ENVIRONMENTS):
        if code.startswith(("# my_module.py", "# test_my_module.py")):
            (tmp_path / code.split()[1]).write_text(code, encoding="utf-8")
    assert "2 passed" in run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_module.py", cwd=tmp_path)


@pytest.mark.parametrize(("reply", "number", "reward"), [("42", 1.0, 1.1), ("41", 1.0, 0.1), ("hello", 0.0, 0.0)])
def test_the_components_of_the_page_explain_the_reward(reply: str, number: float, reward: float) -> None:
    env = names_of(ENVIRONMENTS)["SumEnv"]({}, {"reward_spec": {"ground_truth": "42"}})
    output = env.step(reply)
    assert output["reward"] == reward
    assert output["metadata"]["reward_components"] == {"correct": float(reply == "42"), "number": number}


def answer(request: Request) -> tuple[int, Any]:
    """Answer a lookup with its query, and a chat request with `Yes.` if it mentions thanks."""
    if request.method == "GET":
        return 200, parse_qs(urlsplit(request.path).query).get("query", [""])[0]
    if "nonsense" in str(request.body):
        return 500, ""
    return 200, chat_completion("Yes." if "thanks" in str(request.body) else "no")


@pytest.fixture
def server_url() -> Iterator[str]:
    with serving(answer) as (url, _):
        yield url


def test_the_asynchronous_environment_of_the_page_passes_the_checkup(server_url: str) -> None:
    lookup = names_of(ENVIRONMENTS)["LookupEnv"]
    row = {"prompt": [{"role": "user", "content": "What is tea?"}], "reward_spec": {"ground_truth": "a drink"}}
    findings = list(Checkup(EnvSpec("lookup", lookup), row, {"url": server_url}).run())
    assert {finding.verdict for finding in findings} == {"passed"}

    async def play() -> list[Any]:
        env = lookup({"url": server_url}, {"max_turns": 3, **row})
        try:
            return [await env.step_async(reply) for reply in ("tea", "Answer: a drink")]
        finally:
            await env.close_async()

    first, last = asyncio.run(play())
    assert (first["observations"][0]["content"], first["done"]) == ("tea", False)
    assert (last["reward"], last["done"]) == (1.0, True)


def test_the_judge_of_the_page_scores_samples(server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_URL", server_url)
    names: dict[str, Any] = {}
    (code,) = [code for code in python_blocks(REWARDS) if "judge(" in code]
    try:
        exec(code.replace("timeout_s=60", "timeout_s=60, n_retries=0"), names)
        function = REWARD_FUNCTIONS["polite"].function
        trajectory = Trajectory(TrajectoryID("0", 0), "reply", "test", (Segment([1, 2], 1, [1], [0.0]),), "stop")
        samples = [RewardSample(trajectory, "Say goodbye.", reply) for reply in ("thanks", "go away", "nonsense")]
        assert asyncio.run(function(samples)) == [1.0, 0.0, None]  # type: ignore[arg-type]
    finally:
        REWARD_FUNCTIONS.pop("polite", None)


@pytest.mark.usefixtures("forked_processes")
def test_the_ranks_of_the_page_learn(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = python_blocks(ROOT / "docs/internals/ranks-from-python.md")
    (tmp_path / "sharded.py").write_text(code, encoding="utf-8")
    (tmp_path / "tiny-model").symlink_to(tiny_model_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    asyncio.run(importlib.import_module("sharded").train())
    losses = [float(loss) for loss in re.findall(r"'loss': ([0-9.]+)", capsys.readouterr().out)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_the_tools_of_the_page_are_called() -> None:
    env = names_of(ENVIRONMENTS)["ShopEnv"]({}, {"max_turns": 2, "reward_spec": {"ground_truth": "3"}})
    call = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
    assert env.step(call)["observations"][0]["content"] == "<tool_response>\n3\n</tool_response>"
    assert env.step("3")["reward"] == 1.0


def test_the_environment_with_images_shows_a_dot() -> None:
    dot = names_of(ENVIRONMENTS)["DotEnv"]
    row = {"prompt": [{"role": "system", "content": "Answer in one word."}], "reward_spec": {"ground_truth": "right"}}
    checkup = Checkup(EnvSpec("dot", dot), row)
    assert {finding.verdict for finding in checkup.run()} == {"passed"}
    assert set(checkup.image_sizes) == {"64 x 32"}
    env = dot({}, row)
    image = env.init([])[0][0]["content"][0]["image"]
    assert [image.getpixel((x, 16)) for x in (16, 48)] == [(255, 255, 255), (0, 0, 0)]
    assert env.step("Right")["reward"] == 1.0


def test_the_curriculum_of_the_page_prefers_what_is_not_solved() -> None:
    weights = names_of(DATASETS)["prefer_unsolved"](3, {"easy": 0.5, "hard": 0.5}, {"reward/easy/avg_raw_reward": 0.9})
    assert weights["hard"] > 3 * weights["easy"] > 0


def test_the_dataset_class_of_the_page_generates_rows(tmp_path: Path, tiny_model_path: Path) -> None:
    (code,) = [code for code in python_blocks(DATASETS) if "class Products" in code]
    (tmp_path / "products.py").write_text(code, encoding="utf-8")
    cfg = parse_cli(
        [
            f"data.custom_cls.path='{tmp_path}/products.py'",
            "data.custom_cls.name=Products",
            "+data.custom_cls.config.max_factor=20",
            f"trainer.policy.model.path='{tiny_model_path}'",
        ]
    )
    tokenizer = load_tokenizer(str(tiny_model_path))
    train, validation = (CustomDataset(cfg, tokenizer, split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (100_000, 200)
    rows = [train[index] for index in range(50)]
    assert [row.prompt for row in rows] == [train[index].prompt for index in range(50)]
    assert max(int(row.env_extras["reward_spec"]["ground_truth"]) for row in rows) > 81
    assert {row.env_class for row in rows} == {"gsm8k"}
