"""The files of a run, in `outputs/<project>/<run_name>/`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from skyrl_train.checkpoint import make_folder, parse_steps
from skyrl_train.errors import ConfigError
from skyrl_train.tracking.writer import BackgroundWriter

logger = logging.getLogger(__name__)

EVAL_ONLY = "eval_only"
AGGREGATED = "aggregated_results.jsonl"


@dataclass
class RunFolder:
    """The files of one run. Methods create the folders of the paths they return, but never the files."""

    path: Path

    @classmethod
    def create(cls, output_dir: Path | str, project: str, run: str) -> RunFolder:
        """Create `output_dir/project/run` if it is missing. ConfigError if it is not inside `output_dir`."""
        root = Path(output_dir).expanduser().resolve()
        path = (root / project / run).resolve()
        if not project or not run or root not in path.parents:
            raise ConfigError(
                f"trainer.project_name={project!r} and trainer.run_name={run!r} must name a folder inside {root}; "
                "use plain names such as 'catch' and 'shaped'"
            )
        make_folder(path)
        return cls(path)

    def __post_init__(self) -> None:
        self.config_yaml = self.path / "config.yaml"
        self.changes = self.path / "changes.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.train_log = self.path / "train.log"
        self.learning_curve = self.path / "learning_curve.png"
        self.report = self.path / "report.html"
        self.evaluation_results = self.path / "evals" / EVAL_ONLY / AGGREGATED
        """The metrics file of a run that only evaluates. Written at its end, if there are valid rollouts."""

    def read_config(self) -> tuple[str, dict[str, Any]]:
        """Return the text and the content of `config.yaml`, both empty if there is none."""
        text = self.config_yaml.read_text(encoding="utf-8") if self.config_yaml.exists() else ""
        return text, yaml.safe_load(text) or {}

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
        folder = self.path / "evals" / (EVAL_ONLY if step is None else f"global_step_{step}")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def eval_steps(self) -> list[int]:
        """Return the steps that have an evaluation folder, ascending."""
        return parse_steps(folder.name for folder in self.path.glob("evals/*/"))

    def trajectories(self, step: int) -> Path:
        """Return the trajectory file of one training step."""
        folder = self.path / "trajectories"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"global_step_{step}.jsonl"


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Append the project's log messages (INFO and above) to `path` within the context."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("skyrl_train", "skyrl_gym")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        for logger, old_level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(old_level)
        handler.close()


class _LogFile(logging.FileHandler):
    """A log file, written in the background. Warns once if a message cannot be written, e.g. to a full disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._writer = BackgroundWriter("train.log")
        self._has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.submit(partial(self._write, self.format(record) + self.terminator))
        except OSError as error:
            self._warn(error)
        except Exception:  # noqa: BLE001, a message that cannot be formatted: `handleError` prints the error
            self.handleError(record)

    def _write(self, text: str) -> None:
        assert self.stream is not None, "the file is open until `close`"
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        for close in (self._writer.close, super().close):
            try:
                close()
            except OSError as error:
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("%s lacks the last messages: %s", self.baseFilename, error)
