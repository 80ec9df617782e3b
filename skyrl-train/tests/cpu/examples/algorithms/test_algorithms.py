"""The scripts and READMEs of `examples/algorithms`: valid settings with and without a GPU, and a step of training."""

import functools
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from train_kit import example_scripts
from train_kit.processes import TRAIN_FOLDER
from train_kit.runs import Run

import skyrl_gym
from examples import tiny_model
from examples.catch import warm_start
from examples.catch.catch_dataset import CatchDataset, write_dataset
from examples.catch.recipe import TINY_MODEL
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_train.algorithms.rules import ALGORITHM_WARNINGS
from skyrl_train.config.root import SkyRLConfig
from skyrl_train.config.rules import WARNINGS, find_problems
from skyrl_train.entrypoints.command import parse_cli
from skyrl_train.entrypoints.tiny import tiny_qwen3
from skyrl_train.models.loading import load_tokenizer

FOLDER = TRAIN_FOLDER / "examples/algorithms"
SCRIPTS = {script.stem.removeprefix("run_"): script for script in sorted(FOLDER.glob("*/run_*.sh"))}
READMES = sorted(FOLDER.rglob("README.md"))

SMALL = [
    "trainer.max_training_steps=1",
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=2",
    "trainer.critic_mini_batch_size=2",
    "trainer.eval_interval=-1",
    "trainer.ckpt_interval=-1",
    "trainer.logger=jsonl",
    "generator.n_samples_per_prompt=4",
]

EVIDENCE = {
    "cispo": "policy/ppo_clip_ratio",
    "clip_cov": "policy/masked_token_ratio",
    "custom_policy_loss": "policy/ratio_distance",
    "dapo": "policy/dual_clip_ratio",
    "dppo": "policy/masked_token_ratio",
    "kl_cov": "policy/kl_cov_ratio",
    "on_policy_distillation": "policy/importance_ratio",
    "ppo": "critic/critic_loss",
    "sapo": "policy/sapo_gate",
    "tis_correction": "policy/off_policy_weight_mean",
    "vespo": "policy/vespo_weight",
}
"""A metric that only this algorithm logs, if any."""

NIGHTLY = {"cispo", "dppo", "drgrpo", "gspo", "kl_cov", "maxrl", "reinforce++", "rloo", "sapo", "vespo"}
"""Scripts that differ from others only in a loss or an estimator."""

Record = Callable[..., tuple[str, list[str]]]
Train = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def catch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Catch data, a `model` that replies in the right format, but plays badly, and another `teacher`."""
    folder = tmp_path_factory.mktemp("catch")
    write_dataset(CatchDataset(train_size=100, test_size=4), folder)
    with pytest.MonkeyPatch.context() as constants:
        constants.setattr(tiny_model, "BATCH_SIZE", 4)
        constants.setattr(tiny_model, "LEARNING_RATE", 6e-3)
        for name, value in (("N_CONVERSATIONS", 100), ("N_STEPS", 40)):
            constants.setattr(warm_start, name, value)
        warm_start.make_model(folder / "train.parquet", folder / "model", seed=0)
    tokenizer = load_tokenizer(str(folder / "model"))
    for saved in (tokenizer, tiny_qwen3(tokenizer, seed=1)):
        saved.save_pretrained(folder / "teacher")
    return folder


@pytest.fixture
def record(catch_folder: Path, tmp_path: Path) -> Record:
    """A function that runs a command up to the start of training, and returns the module to run and its arguments."""
    variables = {
        "DATA_DIR": str(catch_folder),
        "MODEL_DIR": str(catch_folder / "model"),
        "TEACHER": str(catch_folder / "teacher"),
        "RECIPE": "\n".join(TINY_MODEL),
    }

    def run(*command: object, has_gpu: bool = False) -> tuple[str, list[str]]:
        words = [str(word) for word in command]
        return example_scripts.record(words, tmp_path, has_gpu=has_gpu, **variables).training

    return run


@pytest.fixture
def train(record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """A function that runs a script with small settings in this process, and returns the metrics of its only step."""
    registries = (ADVANTAGE_ESTIMATORS, POLICY_LOSSES)
    before = [set(registry.list_available()) for registry in registries]

    def run(name: str) -> dict[str, Any]:
        module, argv = record("bash", SCRIPTS[name], *SMALL, f"trainer.output_dir={tmp_path}/outputs")
        monkeypatch.setattr(sys, "argv", [module, *argv])
        runpy.run_path(str(TRAIN_FOLDER / f"{module.replace('.', '/')}.py"), run_name="__main__")
        (folder,) = (tmp_path / "outputs/catch").iterdir()
        return Run(folder).metrics[-1]

    yield run
    for registry, names in zip(registries, before, strict=True):
        for name in set(registry.list_available()) - names:
            registry.unregister(name)
    skyrl_gym.envs.deregister("catch")


@functools.cache
def find_warnings(*argv: str) -> tuple[SkyRLConfig, list[str]]:
    cfg = parse_cli(argv)
    return cfg, find_problems(cfg, WARNINGS + ALGORITHM_WARNINGS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_settings_cause_no_warnings_and_only_the_model_depends_on_the_machine(name: str, record: Record) -> None:
    algorithms = []
    for has_gpu in (False, True):
        module, argv = record("bash", SCRIPTS[name], has_gpu=has_gpu)
        cfg, warnings = find_warnings(*argv)
        assert warnings == []
        assert cfg.trainer.run_name == name
        assert ("Qwen3-1.7B" in cfg.trainer.policy.model.path) is has_gpu
        algorithms.append(cfg.trainer.algorithm)
    model_dependent = {"kl_loss_coef": None, "eps_clip_high": None}
    cpu, gpu = (algorithm.model_copy(update=model_dependent) for algorithm in algorithms)
    assert cpu == gpu, "model, optimizer and batch sizes depend on the machine, and the algorithm does not"
    estimators, losses = ADVANTAGE_ESTIMATORS.list_available(), POLICY_LOSSES.list_available()
    is_built_in = cpu.advantage_estimator in estimators and cpu.policy_loss_type in losses
    assert is_built_in is (module == "examples.catch.main_catch")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name for name in SCRIPTS]
)
def test_each_script_trains(name: str, train: Train) -> None:
    step = train(name)
    assert step["step"] == 1
    assert step["environment/avg_steps"] == 5
    assert step["loss/avg_raw_advantages_abs"] > 0
    assert step["policy/grad_norm"] > 0
    assert EVIDENCE.get(name, "policy/policy_loss") in step
    assert not undocumented(step)
    if name == "dapo":
        punishment = step["loss/avg_final_rewards"] - step["reward/avg_raw_reward"]
        assert -1 <= punishment < 0, "replies longer than a letter are punished"


def undocumented(metrics: dict[str, Any]) -> set[str]:
    """Return the metrics that the reference does not list, apart from those of environments and custom losses."""
    page = (TRAIN_FOLDER.parent / "docs/reference/metrics.md").read_text(encoding="utf-8")
    listed = {name for word in re.findall(r"`([^`\n]+)`", page) for name in expand_braces(word)}
    own = ("environment/", "policy/ratio_distance", "step", "reward/avg_pass_at_", "reward/component/")
    return {m for m in metrics if not {m, m.rpartition("/")[2]} & listed and not m.startswith(own)}


def expand_braces(word: str) -> list[str]:
    """Expand braces: `is_ratio_{mean,std}` gives two names."""
    before, brace, rest = word.partition("{")
    if not brace:
        return [word]
    choices, _, after = rest.partition("}")
    return [name for choice in choices.split(",") for name in expand_braces(f"{before}{choice}{after}")]


def test_overrides_on_the_command_line_take_precedence(record: Record) -> None:
    _, argv = record("bash", SCRIPTS["ppo"], "trainer.run_name=mine", "trainer.policy.model.path=another")
    cfg = parse_cli(argv)
    assert cfg.trainer.run_name == "mine"
    assert cfg.trainer.policy.model.path == cfg.trainer.critic.model.path == "another"
    assert cfg.trainer.critic_mini_batch_size == 4


def test_without_a_teacher_the_command_that_trains_one_is_printed() -> None:
    script = SCRIPTS["on_policy_distillation"]
    environment = os.environ | {"TEACHER": "", "PYTHON": "false"}
    finished = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    (command,) = re.findall(r"^  (bash .*)$", finished.stderr, re.MULTILINE)
    assert command in (script.parent / "README.md").read_text(encoding="utf-8").splitlines()


def test_the_teacher_may_be_a_path_relative_to_any_folder(record: Record, catch_folder: Path) -> None:
    script = SCRIPTS["on_policy_distillation"]
    _, argv = record("bash", "-c", f"cd {catch_folder} && TEACHER=teacher bash '{script}'")
    assert parse_cli(argv).trainer.ref.model.path == str(catch_folder / "teacher")


def read_commands(readme: Path) -> Iterator[list[str]]:
    """Yield the words of each command in a README."""
    for block in re.findall(r"```bash\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_commands_of_the_readmes_are_accepted(readme: Path, record: Record) -> None:
    commands = list(read_commands(readme))
    for command in commands:
        is_script = command[0] == "bash"
        argv = record(*command)[1] if is_script else command[3:]
        assert is_script or command[:3] == ["python", "-m", "skyrl_train.entrypoints.main_base"]
        assert find_warnings(*argv)[1] == [], shlex.join(command)
    for script in readme.parent.glob("run_*.sh"):
        assert ["bash", str(script.relative_to(TRAIN_FOLDER))] in [command[:2] for command in commands]


def test_every_folder_is_listed() -> None:
    listed = re.findall(r"^\| \[`([^`]+)`\]\(\1/README.md\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(readme.parent.name for readme in READMES if readme.parent != FOLDER)
