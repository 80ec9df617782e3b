"""What a run leaves behind, and where: `outputs/<project>/<run_name>/`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.errors import ConfigError

_LOGGED_PACKAGES = ("skyrl_train", "skyrl_gym")
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True)
class RunFolder:
    """The files of one run. Folders that a run writes into are made when they are asked for; files never are."""

    path: Path

    @classmethod
    def create(cls, output_dir: Path | str, project: str, run: str) -> RunFolder:
        """Make `output_dir/project/run`, or find it again. Raises `ConfigError` if that is not inside `output_dir`."""
        root = Path(output_dir).expanduser().resolve()
        path = (root / project / run).resolve()
        if not project or not run or root not in path.parents:
            raise ConfigError(
                f"trainer.project_name={project!r} and trainer.run_name={run!r} must name a folder inside {root}; "
                "use plain names such as 'catch' and 'shaped'"
            )
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @property
    def config_yaml(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def train_log(self) -> Path:
        return self.path / "train.log"

    @property
    def learning_curve(self) -> Path:
        return self.path / "learning_curve.png"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def evals(self, step: int | None) -> Path:
        """The folder of one evaluation: a `<data_source>.jsonl` per source and `aggregated_results.jsonl`.

        `step` is None where nothing was trained.
        """
        return _folder(self.path / "evals" / ("eval_only" if step is None else f"global_step_{step}"))

    def eval_steps(self) -> list[int]:
        """The steps that have an evaluation folder, ascending."""
        matches = (re.fullmatch(r"global_step_(\d+)", folder.name) for folder in self.path.glob("evals/*/"))
        return sorted(int(match[1]) for match in matches if match)

    def trajectories(self, step: int) -> Path:
        """The file of one training step's trajectories; its folder exists."""
        return _folder(self.path / "trajectories") / f"global_step_{step}.jsonl"


@contextmanager
def log_to_file(path: Path, level: int = logging.INFO) -> Iterator[None]:
    """Append what the project's loggers say, from `level` up, to `path` for as long as the context lasts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setLevel(level)
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    loggers = [logging.getLogger(name) for name in _LOGGED_PACKAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(min(logger.getEffectiveLevel(), level))
    try:
        yield
    finally:
        for logger, old_level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(old_level)
        handler.close()


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
