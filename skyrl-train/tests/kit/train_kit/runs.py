"""Training runs in this process, and what they leave in their folder."""

import io
import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyrl_train import callbacks
from skyrl_train.callbacks import Callback, StepReport
from skyrl_train.checkpoint import CheckpointStore
from skyrl_train.compat import cli
from skyrl_train.config.cli import parse
from skyrl_train.config.supervised import DPO, REWARD, SFT
from skyrl_train.entrypoints.command import parse_cli
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.preferences import DPOExp, RewardExp
from skyrl_train.entrypoints.sft import SFTExp
from skyrl_train.trainer import Trainer

UNTIMED = (
    "timing/",
    "generate/avg_seconds",
    "generate/max_seconds",
    "memory/",
    "storage/",
    "trainer/tokens_per_second",
    "train/time(s)",
    "train/throughput",
    "system/",
)
"""Prefixes of metrics that differ between two equal runs."""

EXPERIMENTS: dict[str, tuple[type[Any], Callable[[Sequence[str]], Any]]] = {
    "train": (RLExperiment, parse_cli),
    "sft": (SFTExp, lambda overrides: parse(overrides, SFT)),
    "dpo": (DPOExp, lambda overrides: parse(overrides, DPO)),
    "reward": (RewardExp, lambda overrides: parse(overrides, REWARD)),
}
"""The experiment of each command, and the function that parses its overrides."""


@dataclass(frozen=True)
class Run:
    """The folder of a run, e.g. `outputs/skyrl/test_run`."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The logged metrics, one dictionary per step."""
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def reproducible_metrics(self) -> list[dict[str, Any]]:
        """The metrics without timings, which two equal runs have in common."""
        return [{k: v for k, v in step.items() if not k.startswith(UNTIMED)} for step in self.metrics]

    @property
    def steps(self) -> list[int]:
        """The steps that have metrics."""
        return [step["step"] for step in self.metrics]

    @property
    def checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.folder / "ckpts")

    @property
    def log(self) -> str:
        """The text of train.log."""
        return (self.folder / "train.log").read_text()

    def trajectories(self, step: int) -> list[dict[str, Any]]:
        """Return the dumped trajectories of a step."""
        return read_lines(self.folder / f"trajectories/global_step_{step}.jsonl")

    def export(self, step: int, role: str = "policy") -> Path:
        """Return the folder of a model that was exported after a step."""
        return self.folder / f"export/global_step_{step}" / role

    def weights(self, step: int, role: str = "policy") -> dict[str, torch.Tensor]:
        """Return a model's exported weights after a step."""
        return load_file(self.export(step, role) / "model.safetensors")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def small_run(
    folder: Path, *overrides: str, model: Path, data: Path, val_data: Path | None = None, name: str = "test_run"
) -> list[str]:
    """Return the overrides of a run that writes `skyrl/<name>` in `folder`: batches of 4 prompts, replies of 4 tokens.

    Later `overrides` win. Without validation data, the run evaluates nothing.
    """
    validation = (
        ["data.val_data=[]", "trainer.eval_interval=-1"] if val_data is None else [f"data.val_data=['{val_data}']"]
    )
    return [
        f"data.train_data=['{data}']",
        *validation,
        f"trainer.policy.model.path='{model}'",
        f"trainer.output_dir='{folder}'",
        f"trainer.run_name={name}",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "trainer.logger=jsonl",
        "generator.sampling_params.max_generate_length=4",
        *overrides,
    ]


def catch_run(folder: Path, *overrides: str, model: Path, data: Path, name: str = "test_run") -> list[str]:
    """Return the overrides of a run of two steps on the games of the fixture `catch_data`, with evaluations."""
    files = {"data": data / "train.parquet", "val_data": data / "validation.parquet"}
    game = ["generator.max_turns=5", "generator.sampling_params.max_generate_length=1"]
    return small_run(folder, *game, *overrides, model=model, **files, name=name)


def supervised_run(folder: Path, *overrides: str, model: Path, data: Path, name: str = "test_run") -> list[str]:
    """Return the overrides of a run of 6 steps on the answers of `train_kit.datasets.write_answers`.

    It validates and saves a checkpoint after each second step, and exports the model at the end.
    """
    return [
        f"data.train_data='{data}/train.jsonl'",
        f"data.val_data='{data}/val.jsonl'",
        "data.max_length=200",
        f"trainer.policy.model.path='{model}'",
        f"trainer.output_dir='{folder}'",
        f"trainer.run_name={name}",
        "trainer.epochs=3",
        "trainer.train_batch_size=5",
        "trainer.policy.optimizer_config.lr=3e-3",
        "trainer.ckpt_interval=2",
        "trainer.eval_interval=2",
        "trainer.hf_save_interval=100",
        "trainer.logger=jsonl",
        *overrides,
    ]


def preference_run(folder: Path, *overrides: str, model: Path, data: Path, name: str = "test_run") -> list[str]:
    """Return the overrides of a run of 4 steps on the pairs of `train_kit.datasets.write_pairs`."""
    shape = ["trainer.epochs=2", "trainer.train_batch_size=4"]
    return supervised_run(folder, *shape, *overrides, model=model, data=data, name=name)


def run_of(overrides: Sequence[str]) -> Run:
    """Return the run that a command with these overrides writes."""
    values = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    project, name = values.get("trainer.project_name", "skyrl"), values["trainer.run_name"]
    return Run(Path(values["trainer.output_dir"].strip("'")) / project / name)


def train(*overrides: str, command: str = "train") -> Run:
    """Run `skyrl train`, or another command such as `sft`, in this process."""
    status = cli.main([command, *overrides])
    assert status == 0, f"skyrl {command} ended with status {status}"
    return run_of(overrides)


def train_with(
    *overrides: str,
    first: Sequence[Callback] = (),
    last: Sequence[Callback] = (),
    trainer: type[Trainer] | None = None,
    command: str = "train",
) -> Run:
    """Run the experiment of a command with callbacks before and after its own; raise its errors."""
    kind, parse_overrides = EXPERIMENTS[command]

    class Experiment(kind):  # type: ignore[misc]
        def get_callbacks(self, *parts: Any) -> list[Callback]:
            return [*first, *super().get_callbacks(*parts), *last]

    if trainer is not None:
        Experiment.trainer_class = trainer
    Experiment(parse_overrides(overrides)).run()
    return run_of(overrides)


def expect_error(*overrides: str, command: str = "train", status: int = 1) -> str:
    """Run a command that must end with this exit status, and return its messages on standard error."""
    with redirect_stderr(io.StringIO()) as messages:
        ended = cli.main([command, *overrides])
    assert ended == status, messages.getvalue()
    assert "Traceback" not in messages.getvalue()
    return messages.getvalue()


class AtStepEnd(Callback):
    """Calls a function after each step, which gets the run and the number of the step."""

    def __init__(self, function: Callable[[callbacks.Run, int], object]) -> None:
        self._function = function

    async def on_step_end(self, run: callbacks.Run, report: StepReport) -> None:
        self._function(run, report.global_step)


def stop_after(step: int, *overrides: str, command: str = "train") -> Run:
    """Stop a run after a step. A run with fewer steps would have another schedule of the learning rate."""

    def stop(run: callbacks.Run, global_step: int) -> None:
        if global_step == step:
            run.request_stop("for the test")

    with pytest.raises(KeyboardInterrupt):
        train_with(*overrides, first=[AtStepEnd(stop)], command=command)
    run = run_of(overrides)
    assert run.steps[-1] == step
    return run


def assert_equal_runs(run: Run, expected: Run) -> None:
    """Assert that two runs have the same metrics and exported weights, bit for bit."""
    assert run.reproducible_metrics == expected.reproducible_metrics
    for file, tensors in _exports(expected):
        found = load_file(run.folder / file)
        assert found.keys() == tensors.keys()
        assert [name for name, tensor in tensors.items() if not torch.equal(found[name], tensor)] == [], file


def assert_close_runs(run: Run, expected: Run, rel: float = 1e-5) -> None:
    """Assert that two runs have the same metrics and exported weights up to rounding."""
    for step, expected_step in zip(run.reproducible_metrics, expected.reproducible_metrics, strict=True):
        step = {name: value for name, value in step.items() if not name.startswith("sync/")}
        assert step == pytest.approx(expected_step, rel=rel, abs=1e-5)
        losses = {name: value for name, value in expected_step.items() if name in ("train/loss", "val/loss")}
        assert {name: step[name] for name in losses} == pytest.approx(losses, rel=1e-6)
    for file, tensors in _exports(expected):
        found = load_file(run.folder / file)
        for name, tensor in tensors.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=f"{file} {name}")


def _exports(run: Run) -> list[tuple[Path, dict[str, torch.Tensor]]]:
    """Return the exported weights of a run by their path in its folder; it must have exported something."""
    files = sorted((run.folder / "export").rglob("*.safetensors"))
    assert files, f"{run.folder} has no exports"
    return [(file.relative_to(run.folder), load_file(file)) for file in files]
