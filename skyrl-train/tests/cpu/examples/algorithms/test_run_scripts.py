"""The scripts of `examples/algorithms`: valid settings with and without a GPU, and a step of training."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_train.algorithms.rules import ALGORITHM_WARNINGS
from skyrl_train.config.validation import WARNINGS, find_problems
from skyrl_train.entrypoints.command import parse_cli

ROOT = Path(__file__).parents[5]
SCRIPTS = sorted((ROOT / "skyrl-train/examples/algorithms").glob("*/run_*.sh"))
NAMES = [script.stem.removeprefix("run_") for script in SCRIPTS]

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

Train = Callable[[Path], dict[str, Any]]


@pytest.fixture
def train(record: Callable[..., Any], _own_registries: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Run a script with small settings in this process, and return the metrics of its only step."""

    def run(script: Path) -> dict[str, Any]:
        module, argv = record(["bash", str(script), *SMALL, f"trainer.output_dir={tmp_path}/outputs"])
        monkeypatch.setattr(sys, "argv", [module, *argv])
        runpy.run_path(str(ROOT / "skyrl-train" / f"{module.replace('.', '/')}.py"), run_name="__main__")
        (metrics,) = (tmp_path / "outputs/catch").glob("*/metrics.jsonl")
        return json.loads(metrics.read_text().splitlines()[-1])

    return run


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_settings_cause_no_warnings_and_only_the_model_depends_on_the_machine(
    script: Path, record: Callable[..., Any]
) -> None:
    algorithms = []
    for has_gpu in (False, True):
        module, argv = record(["bash", str(script)], has_gpu=has_gpu)
        cfg = parse_cli(argv)
        assert find_problems(cfg, WARNINGS + ALGORITHM_WARNINGS) == []
        assert cfg.trainer.run_name == script.stem.removeprefix("run_")
        assert ("Qwen3-1.7B" in cfg.trainer.policy.model.path) is has_gpu
        algorithms.append(cfg.trainer.algorithm)
    model_dependent = {"kl_loss_coef": None, "eps_clip_high": None}
    cpu, gpu = (algorithm.model_copy(update=model_dependent) for algorithm in algorithms)
    assert cpu == gpu, "model, optimizer and batch sizes depend on the machine, and the algorithm does not"
    estimators, losses = ADVANTAGE_ESTIMATORS.list_available(), POLICY_LOSSES.list_available()
    is_built_in = cpu.advantage_estimator in estimators and cpu.policy_loss_type in losses
    assert is_built_in is (module == "examples.catch.main_catch")


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_each_script_trains(script: Path, train: Train) -> None:
    step = train(script)
    assert step["step"] == 1
    assert step["environment/avg_steps"] == 5
    assert step["loss/avg_raw_advantages_abs"] > 0
    assert step["policy/grad_norm"] > 0
    assert EVIDENCE.get(script.stem.removeprefix("run_"), "policy/policy_loss") in step
    assert not undocumented(step)


def undocumented(metrics: dict[str, Any]) -> set[str]:
    """Return the metrics that the reference does not list, apart from those of environments and custom losses."""
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
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


def test_dapo_punishes_replies_longer_than_a_letter(train: Train) -> None:
    step = train(SCRIPTS[NAMES.index("dapo")])
    punishment = step["loss/avg_final_rewards"] - step["reward/avg_raw_reward"]
    assert -1 <= punishment < 0


def test_overrides_on_the_command_line_take_precedence(record: Callable[..., Any]) -> None:
    ppo = str(SCRIPTS[NAMES.index("ppo")])
    _, argv = record(["bash", ppo, "trainer.run_name=mine", "trainer.policy.model.path=another"])
    cfg = parse_cli(argv)
    assert cfg.trainer.run_name == "mine"
    assert cfg.trainer.policy.model.path == cfg.trainer.critic.model.path == "another"
    assert cfg.trainer.critic_mini_batch_size == 4


def test_without_a_teacher_the_command_that_trains_one_is_printed() -> None:
    script = SCRIPTS[NAMES.index("on_policy_distillation")]
    environment = os.environ | {"TEACHER": "", "PYTHON": "false"}
    finished = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    (command,) = re.findall(r"^  (bash .*)$", finished.stderr, re.MULTILINE)
    assert command in (script.parent / "README.md").read_text(encoding="utf-8").splitlines()


def test_the_teacher_may_be_a_path_relative_to_any_folder(record: Callable[..., Any], teacher: Path) -> None:
    script = SCRIPTS[NAMES.index("on_policy_distillation")]
    _, argv = record(["bash", "-c", f"cd {teacher.parent} && TEACHER=teacher bash '{script}'"])
    assert parse_cli(argv).trainer.ref.model.path == str(teacher)
