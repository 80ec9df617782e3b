"""The files of a run, in `outputs/<project>/<run_name>/`."""

import json
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

EVAL_ONLY = "eval_only"
AGGREGATED = "aggregated_results.jsonl"
IMAGE_FOLDER = "images"
"""Folder of the images of trajectories, beside the files or folders of the steps."""

IMAGE_NAME = re.compile(r"[0-9a-f]{32}\.[a-z0-9]+")


@dataclass(frozen=True)
class Session:
    """A process of a run, as recorded in `session.json`. Times are in seconds since 1970."""

    total_steps: int
    first_step: int
    """Last finished step when the process started: 0, or the step of the checkpoint that it resumed from."""
    started_at: float
    host: str
    pid: int
    ended_at: float | None = None
    error: str | None = None
    """Why it ended before its last step, or None."""

    @property
    def is_alive(self) -> bool:
        """True until the process ends. A process on another host that was killed counts as alive."""
        if self.ended_at is not None or self.host != socket.gethostname():
            return self.ended_at is None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it belongs to another user
            return True
        return True


@dataclass
class RunFolder:
    """The files of one run. Reading it creates nothing."""

    path: Path

    def __post_init__(self) -> None:
        self.config_yaml = self.path / "config.yaml"
        self.changes = self.path / "changes.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.findings = self.path / "diagnosis.jsonl"
        self.waits = self.path / "waits.json"
        self.stacks = self.path / "stacks.txt"
        self.train_log = self.path / "train.log"
        self.learning_curve = self.path / "learning_curve.png"
        self.report = self.path / "report.html"
        self.browser = self.path / "trajectories.html"
        self.session = self.path / "session.json"
        self.evaluation_results = self.path / "evals" / EVAL_ONLY / AGGREGATED
        """The metrics file of a run that only evaluates. Written at its end, if there are valid rollouts."""

    def read_config(self) -> tuple[str, dict[str, Any]]:
        """Return the text and the content of `config.yaml`, both empty if there is none."""
        text = self.config_yaml.read_text(encoding="utf-8") if self.config_yaml.exists() else ""
        return text, yaml.safe_load(text) or {}

    def read_session(self) -> Session | None:
        """Return the process that writes into the folder, or wrote last. None for a run of an earlier version."""
        try:
            content = json.loads(self.session.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Session(**{field.name: content[field.name] for field in fields(Session) if field.name in content})

    def read_changes(self) -> list[dict[str, Any]]:
        """Return changed settings by ascending step: `{"after_step": 10, "settings": ["trainer.seed: 1 -> 2"]}`."""
        if not self.changes.exists():
            return []
        return [json.loads(line) for line in self.changes.read_text(encoding="utf-8").splitlines()]

    @property
    def has_training(self) -> bool:
        """True if a training run has started here. Its checkpoints may be elsewhere, but `config.yaml` is here."""
        has_files = bool(self.eval_steps()) or any((self.path / name).exists() for name in ("ckpts", "trajectories"))
        return has_files or (self.config_yaml.exists() and not (self.path / "evals" / EVAL_ONLY).is_dir())

    @property
    def has_separate_evaluation(self) -> bool:
        """True for the folder of a run that only evaluates."""
        return (self.path / "evals" / EVAL_ONLY).is_dir() and not self.has_training

    def evals(self, step: int | None) -> Path:
        """Return the folder of one evaluation. `step` is None for a run that only evaluates.

        The folder holds one `<data_source>.jsonl` per source and `aggregated_results.jsonl`.
        """
        return self.path / "evals" / (EVAL_ONLY if step is None else f"global_step_{step}")

    def eval_steps(self) -> list[int]:
        """Return the steps that have an evaluation folder, ascending."""
        return parse_steps(folder.name for folder in self.path.glob("evals/*/"))

    def trajectory_steps(self) -> list[int]:
        """Return the training steps whose trajectories are written, ascending."""
        return parse_steps(path.stem for path in self.path.glob("trajectories/*.jsonl"))

    def trajectories(self, step: int) -> Path:
        """Return the trajectory file of one training step."""
        return self.path / "trajectories" / f"global_step_{step}.jsonl"


def parse_steps(names: Iterable[str]) -> list[int]:
    """Return N for each name `global_step_N`, ascending. Other names are ignored."""
    matches = (re.fullmatch(r"global_step_(\d+)", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def format_marker(image_name: str) -> str:
    """Return the marker of an image file in the text of a trajectory, e.g. `<|image:0b1f2c3d|>`.

    It replaces the placeholder tokens of the image. The model never sees the digits, so it cannot write a marker.
    """
    return f"<|image:{image_name[:8]}|>"
