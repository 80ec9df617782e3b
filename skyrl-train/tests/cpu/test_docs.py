"""The code in the documentation runs, and the names in it exist."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyrl_gym
from examples.catch.catch_dataset import CatchDataset, write_dataset
from examples.catch.main_catch import register_catch
from skyrl_gym.checkup.rules import Checkup
from skyrl_gym.envs import BUILT_IN as BUILT_IN_ENVIRONMENTS
from skyrl_gym.envs.registration import EnvSpec
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, Registry
from skyrl_train.callbacks import StepReport
from skyrl_train.config.problems import FIELDS
from skyrl_train.entrypoints.main_base import main, parse_cli
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.rewards import REWARD_FUNCTIONS

ROOT = Path(__file__).parents[3]
EXTENDING = ROOT / "docs/guides/extending.md"
ALGORITHMS = ROOT / "docs/reference/algorithms.md"
ENVIRONMENTS = ROOT / "docs/guides/environments.md"
REGISTRIES: tuple[Registry, ...] = (ADVANTAGE_ESTIMATORS, POLICY_LOSSES)
BUILT_IN = {name: registry.get(name) for registry in REGISTRIES for name in registry.list_available()}
KEY = re.compile(r"\b(?:data|trainer|generator|environment)\.\w+(?:\.\w+)*")


@pytest.fixture
def registered() -> Iterator[list[str]]:
    """Run the first five examples, and return the names of the estimators and losses that they register."""
    register_catch()
    before = [set(registry.list_available()) for registry in REGISTRIES]
    for code in re.findall(r"```python\n(.*?)```", EXTENDING.read_text(encoding="utf-8"), re.DOTALL)[:5]:
        exec(code, {})
    added = [set(registry.list_available()) - names for registry, names in zip(REGISTRIES, before, strict=True)]
    yield [name for names in added for name in sorted(names)]
    del REWARD_FUNCTIONS["brevity"]
    for registry, names in zip(REGISTRIES, added, strict=True):
        for name in names:
            registry.unregister(name)
    skyrl_gym.envs.deregister("catch")


@pytest.mark.parametrize(
    ("loss", "metric"),
    [
        ("forgetful", "policy/negative_tokens"),
        ("unclipped", "policy/policy_loss"),
        ("reduced", "policy/ppo_clip_ratio"),
    ],
)
def test_the_estimator_and_losses_of_the_page_train(
    registered: list[str], loss: str, metric: str, tiny_model_path: Path, tmp_path: Path
) -> None:
    estimator, *losses = registered
    assert loss in losses
    write_dataset(CatchDataset(train_size=4, test_size=2), tmp_path)
    main(
        [
            f"data.train_data=['{tmp_path}/train.parquet']",
            f"data.val_data=['{tmp_path}/validation.parquet']",
            f"trainer.policy.model.path='{tiny_model_path}'",
            f"trainer.output_dir='{tmp_path}'",
            "trainer.run_name=test_run",
            f"trainer.algorithm.advantage_estimator={estimator}",
            f"trainer.algorithm.policy_loss_type={loss}",
            "trainer.algorithm.custom.negative_share=0.5",
            "generator.reward_functions=[brevity]",
            "generator.reward_weights.brevity=0.1",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=2",
            "trainer.logger=jsonl",
            "generator.max_turns=5",
            "generator.sampling_params.max_generate_length=1",
        ]
    )
    last = json.loads((tmp_path / "skyrl/test_run/metrics.jsonl").read_text().splitlines()[-1])
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
    codes = re.findall(r"```python\n(.*?)```", EXTENDING.read_text(encoding="utf-8"), re.DOTALL)
    exec(next(code for code in codes if "class StopWhenSolved" in code), names)
    experiment = names["Experiment"](parse_cli(catch_run))
    with experiment.get_tracker() as tracker:
        callbacks = experiment.get_callbacks(experiment.get_eval_dataset(), GeneratorInterface(), tracker)
    kinds = [type(callback).__name__ for callback in callbacks]
    assert kinds[1:3] == ["Evaluation", "StopWhenSolved"]
    run = StoppableRun()
    asyncio.run(callbacks[2].on_step_end(run, StepReport(1, False, {"eval/all/avg_score": score})))
    assert run.reasons == reasons


def environments_page(name: str) -> Any:
    """Run the Python code of the page on environments and return its definition of `name`."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", ENVIRONMENTS.read_text(encoding="utf-8"), re.DOTALL):
        exec(code, names)
    return names[name]


def test_the_environment_of_the_page_passes_the_checkup() -> None:
    (row,) = re.findall(r"```json\n(.*?)```", ENVIRONMENTS.read_text(encoding="utf-8"), re.DOTALL)
    findings = list(Checkup(EnvSpec("higher_lower", environments_page("HigherLowerEnv")), json.loads(row)).run())
    assert {finding.verdict for finding in findings} == {"passed"}
    assert f"my_module:HigherLowerEnv: {len(findings)} passed" in ENVIRONMENTS.read_text(encoding="utf-8")


def test_the_tools_of_the_page_are_called() -> None:
    env = environments_page("ShopEnv")({}, {"max_turns": 2, "reward_spec": {"ground_truth": "3"}})
    call = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
    assert env.step(call)["observations"][0]["content"] == "<tool_response>\n3\n</tool_response>"
    assert env.step("3")["reward"] == 1.0


def test_the_curriculum_of_the_page_prefers_what_is_not_solved() -> None:
    weights = environments_page("prefer_unsolved")(3, {"easy": 0.5, "hard": 0.5}, {"reward/easy/avg_raw_reward": 0.9})
    assert weights["hard"] > 3 * weights["easy"] > 0


def test_the_page_lists_all_environments() -> None:
    page = ENVIRONMENTS.read_text(encoding="utf-8")
    ours = set(keys_of_tables(page.partition("### Programs")[0])) - {"env_class"}
    of_others = set(re.findall(r"environment\.env_class=(\w+)", page.partition("## Environments of other")[2]))
    assert set(BUILT_IN_ENVIRONMENTS) == ours | of_others


def keys_of_tables(section: str) -> list[str]:
    """Return the first column of a section's tables."""
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_algorithm_has_a_row_with_its_source_and_tests(name: str) -> None:
    page = ALGORITHMS.read_text(encoding="utf-8")
    sections = [text for text in re.split(r"^###? ", page, flags=re.MULTILINE) if name in keys_of_tables(text)]
    function = inspect.unwrap(BUILT_IN[name])
    source = Path(inspect.getfile(function)).relative_to(ROOT)
    (section,) = [text for text in sections if f"Source `{source}`" in text] or [""]
    assert section, f"docs/reference/algorithms.md has no row for `{name}` under its source {source}"
    row = next(line for line in section.splitlines() if line.startswith(f"| `{name}` |"))
    assert row.split("|")[2].strip() == f"`{function.__name__}`"
    (tests,) = re.findall(r"tests\s`([^`]+)`", section)
    text = (ROOT / tests).read_text(encoding="utf-8")
    assert function.__name__ in text or f'"{name}"' in text, f"{tests} does not test it"


def test_names_and_paths_on_the_page_of_algorithms_exist() -> None:
    page = ALGORITHMS.read_text(encoding="utf-8")
    registry_sections = re.split(r"^## (?:Advantage estimators|Policy losses|Reductions)$", page, flags=re.MULTILINE)[
        1:3
    ]
    assert {name for section in registry_sections for name in keys_of_tables(section)} == set(BUILT_IN)
    missing = [path for path in re.findall(r"`(skyrl-\w+/[^`]+)`", page) if not (ROOT / path).exists()]
    assert not missing


def test_no_command_installs_our_packages_from_pypi() -> None:
    """PyPI has another project named skyrl-gym."""
    folders = ("docs", "skyrl-gym", "skyrl-train", "skyrl-tx", "veritas-rl")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py", ".sh")]
    paths = [path for path in files if "site-packages" not in path.parts]
    paths += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    from_pypi = re.compile(r"pip install[^\n`]*?(?<!-e)[\s']skyrl-\w+\[")
    assert len(paths) > 500
    assert [str(path) for path in paths if from_pypi.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "page",
    [
        ALGORITHMS,
        ENVIRONMENTS,
        EXTENDING,
        ROOT / "docs/guides/rollouts.md",
        *(ROOT / "skyrl-train/examples/algorithms").rglob("*.md"),
    ],
)
def test_configuration_keys_on_the_pages_exist(page: Path) -> None:
    sections = {key.rpartition(".")[0] for key in FIELDS}
    words = [word for word in KEY.findall(page.read_text(encoding="utf-8")) if not word.endswith((".py", ".md"))]
    free = (
        "trainer.algorithm.custom.",
        "trainer.algorithm.gdpo.weights.",
        "generator.reward_weights.",
        "generator.chat_template_kwargs.",
        "environment.skyrl_gym.",
        "generator.engine_init_kwargs.",
        "data.mixture.weights.",
    )
    unknown = {word for word in words if word not in FIELDS and word not in sections and not word.startswith(free)}
    assert not unknown
