"""Training runs in this process, and what they leave in their folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from skyrl_train.entrypoints import cli

UNTIMED = ("timing/", "storage/", "trainer/tokens_per_second", "train/time(s)", "train/throughput", "system/")
"""Prefixes of metrics that differ between two equal runs."""


@dataclass(frozen=True)
class Run:
    """The folder of a run, e.g. `outputs/skyrl/test_run`."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The logged metrics, one dictionary per step."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def reproducible_metrics(self) -> list[dict[str, Any]]:
        """The metrics without timings, which two equal runs have in common."""
        return [{k: v for k, v in step.items() if not k.startswith(UNTIMED)} for step in self.metrics]

    @property
    def log(self) -> str:
        """The text of train.log."""
        return (self.folder / "train.log").read_text()

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        """Return the policy's exported weights after a step."""
        return load_file(self.folder / f"export/global_step_{step}/policy/model.safetensors")


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
