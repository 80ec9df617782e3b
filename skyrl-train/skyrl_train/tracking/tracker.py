"""`Tracking`: one call that sends a step's metrics to every chosen backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from skyrl_train.errors import ConfigError
from skyrl_train.tracking.console import ConsoleTracker
from skyrl_train.tracking.jsonl import MetricsFile
from skyrl_train.tracking.run_folder import RunFolder


class Tracker(Protocol):
    """One place that metrics go to."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def truncate_after(self, step: int) -> None:
        """Forget what was logged after `step`, as far as the backend can; the run goes on from there."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class RunIdentity:
    """What a backend may need to know about the run, e.g. `RunIdentity("catch", "shaped", {"seed": 1}, folder)`."""

    project_name: str
    experiment_name: str
    config: Mapping[str, Any]
    folder: RunFolder


def _jsonl(run: RunIdentity) -> Tracker:
    return MetricsFile(run.folder.metrics)


def _console(run: RunIdentity) -> Tracker:
    return ConsoleTracker()


def _tensorboard(run: RunIdentity) -> Tracker:
    from skyrl_train.tracking.tensorboard import TensorBoardTracker

    return TensorBoardTracker(run.folder.path / "tensorboard")


def _wandb(run: RunIdentity) -> Tracker:
    from skyrl_train.tracking.wandb import WandbTracker

    return WandbTracker(run.project_name, run.experiment_name, run.config, run.folder.path)


_FACTORIES: dict[str, Callable[[RunIdentity], Tracker]] = {
    "jsonl": _jsonl,
    "console": _console,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
BACKENDS: tuple[str, ...] = tuple(_FACTORIES)


class Tracking:
    """Logs metrics to `metrics.jsonl` in the run folder, always, and to each of `backends`.

    Raises `ConfigError` for an unknown backend, or one that cannot start.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        backends: str | Sequence[str],
        config: Mapping[str, Any] | None,
        run_dir: Path,
    ) -> None:
        names = _backend_names(backends)
        run = RunIdentity(project_name, experiment_name, config or {}, RunFolder(Path(run_dir)))
        self._held_step: int | None = None
        self._held_metrics: dict[str, float] = {}
        self._trackers: list[Tracker] = []
        try:
            for name in names:
                self._trackers.append(_FACTORIES[name](run))
        except BaseException:
            self._close_trackers()
            raise

    def log(self, metrics: Mapping[str, float], step: int, commit: bool = True) -> None:
        """Log `metrics` at `step`; with `commit=False` they wait for the next call and go out with it.

        Metrics that wait for another step than the next call's are logged first, at their own step.
        """
        if self._held_step not in (None, step):
            self._release()
        self._held_step = step
        self._held_metrics.update(metrics)
        if commit:
            self._release()

    def truncate_after(self, step: int) -> None:
        """Called on resume from the checkpoint of `step`: later steps will be logged again."""
        self._release()
        for tracker in self._trackers:
            tracker.truncate_after(step)

    def close(self) -> None:
        """Log what still waits, then close every backend. Safe to call twice."""
        try:
            if self._trackers:
                self._release()
        finally:
            self._close_trackers()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _release(self) -> None:
        step, metrics = self._held_step, self._held_metrics
        self._held_step, self._held_metrics = None, {}
        if step is not None and metrics:
            for tracker in self._trackers:
                tracker.log(metrics, step)

    def _close_trackers(self) -> None:
        while self._trackers:
            self._trackers.pop().close()


def _backend_names(backends: str | Sequence[str]) -> list[str]:
    """The backends to open, `jsonl` first, each once."""
    asked = [backends] if isinstance(backends, str) else list(backends)
    for name in asked:
        if name not in _FACTORIES:
            raise ConfigError(
                f"trainer.logger={name!r} is not a tracking backend; choose from {', '.join(BACKENDS)} (one, or a list)"
            )
    return list(dict.fromkeys(["jsonl", *asked]))
