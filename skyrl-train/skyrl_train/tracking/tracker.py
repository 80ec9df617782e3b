"""`Tracking` sends a step's metrics to all chosen backends."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

from tqdm import tqdm

from skyrl_gym.runtime.text import describe_error
from skyrl_report.run_folder import RunFolder
from skyrl_train.checkpoint import replace_text
from skyrl_train.config.rules.run import find_wandb_problem
from skyrl_train.errors import ConfigError
from skyrl_train.tracking.jsonl import MetricsFile
from skyrl_train.tracking.writer import TIMEOUT_S, BackgroundWriter
from skyrl_train.watchdog import TRACKER, Wait

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A backend for metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def truncate_after(self, step: int) -> None:
        """Drop everything after `step`, if the backend can. A resumed run logs those steps again."""

    def close(self) -> None:
        """Finish writing and release all resources."""


class ConsoleTracker(Tracker):
    """A tracker that writes to standard output, one line per prefix: `policy   grad_norm 0.41 · policy_kl 0.002`."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        lines = [f"step {step}"]
        for prefix, names in groupby(sorted(metrics), key=lambda name: name.rpartition("/")[0]):
            values = " · ".join(f"{name.rpartition('/')[2]} {metrics[name]:.4g}" for name in names)
            lines.append(f"  {prefix:<12} {values}")
        tqdm.write("\n".join(lines), file=sys.stdout)  # above the progress line, if any


class TensorBoardTracker:
    """A tracker that writes event files to `log_dir`, or to `$TENSORBOARD_DIR` if it is set."""

    def __init__(self, log_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._new_writer = partial(SummaryWriter, os.environ.get("TENSORBOARD_DIR") or str(log_dir))
        self._writer = self._new_writer()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Start a new event file. Its `purge_step` makes TensorBoard hide the later steps of older files."""
        self._writer.close()
        self._writer = self._new_writer(purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A tracker that logs to a Weights & Biases run, with files in `run_dir/wandb` or `$WANDB_DIR/wandb`.

    The run's ID is in `id_dir/wandb_run_id.txt` or `$WANDB_RUN_ID`, so a resumed run continues the same wandb run. The
    horizontal axis is the metric `global_step`, not wandb's step, so a resumed run can log steps again, and rewards and
    environments in this process can call `wandb.log`.

    Raises:
        ConfigError: there is no login, the package is not installed, or wandb cannot start the run.
    """

    STEP = "global_step"

    def __init__(
        self, project_name: str, run_name: str, config: Mapping[str, Any], run_dir: Path, id_dir: Path
    ) -> None:
        if problem := find_wandb_problem(os.environ):
            raise ConfigError(problem)
        import wandb

        id_dir.mkdir(parents=True, exist_ok=True)
        self._id_file = id_dir / "wandb_run_id.txt"
        folder = os.environ.get("WANDB_DIR") or str(run_dir)
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._name = run_name

        def start(run_id: str) -> Any:
            try:
                run = wandb.init(
                    project=project_name, name=run_name, config=dict(config), dir=folder, id=run_id, resume="allow"
                )
            except wandb.Error as error:
                raise ConfigError(
                    f"wandb could not start the run {project_name}/{run_name}: {error}; "
                    "check WANDB_API_KEY and the network, or export WANDB_MODE=offline"
                ) from error
            run.define_metric(self.STEP, hidden=True)
            run.define_metric("*", step_metric=self.STEP)
            replace_text(self._id_file, run_id)
            return run

        self._start = start
        self._new_artifact = wandb.Artifact
        known_id = self._id_file.read_text().strip() if self._id_file.exists() else ""
        self._continues = bool(known_id) and not os.environ.get("WANDB_RUN_ID")
        self._run = start(os.environ.get("WANDB_RUN_ID") or known_id or token_hex(4))
        self._has_failed = False

    def _call(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Call wandb, and warn of its first failure: wandb's process can end at any time, but the run must go on."""
        try:
            function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001, wandb raises errors of many types
            if not self._has_failed:
                logger.warning(
                    "wandb failed, and may lack the metrics from here on; metrics.jsonl has them all: %s",
                    describe_error(error),
                )
            self._has_failed = True

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._call(self._run.log, {**{name: float(value) for name, value in metrics.items()}, self.STEP: step})

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Log a checkpoint's files as a new version of the artifact `<run_name>-checkpoint`."""
        name = re.sub(r"[^\w.-]", "-", f"{self._name}-checkpoint")
        artifact = self._new_artifact(name, type="model", metadata={self.STEP: step})
        artifact.add_dir(str(path))
        self._call(self._run.log_artifact, artifact, aliases=["latest", f"step-{step}"])

    def truncate_after(self, step: int) -> None:
        """Start a new wandb run if training restarts from scratch. A resumed run continues its wandb run."""
        if step < 0 and self._continues:
            self._call(self._run.finish)
            self._run = self._start(token_hex(4))
        self._continues = False

    def close(self) -> None:
        self._call(self._run.finish)


class Tracking:
    """Logs metrics to all `backends`, and always to `metrics.jsonl` in the run folder.

    Files are written in the background. `id_dir` (default: the run folder) stores the ID of the wandb run.

    Raises:
        ConfigError: a backend is unknown or cannot start.
    """

    def __init__(
        self,
        project_name: str,
        run_name: str,
        backends: str | Sequence[str],
        config: Mapping[str, Any],
        run_dir: Path,
        id_dir: Path | None = None,
    ) -> None:
        start: dict[str, Callable[[], Tracker]] = {
            "jsonl": lambda: MetricsFile(self.run_folder.metrics),
            "console": ConsoleTracker,
            "tensorboard": lambda: TensorBoardTracker(run_dir / "tensorboard"),
            "wandb": lambda: WandbTracker(project_name, run_name, config, run_dir, id_dir or run_dir),
        }
        names = dict.fromkeys(["jsonl", *([backends] if isinstance(backends, str) else backends)])
        for name in names:
            if name not in start:
                choices = ", ".join(start)
                raise ConfigError(
                    f"trainer.logger={name!r} is not a tracking backend; choose from {choices} (one, or a list)"
                )
        self.run_folder = RunFolder(run_dir)
        self._trackers: list[Tracker] = []
        self._uncommitted: dict[str, float] = {}
        with ExitStack() as started:
            for name in names:
                self._trackers.append(start[name]())
                started.callback(self._trackers[-1].close)
            self._writer = BackgroundWriter("metrics")
            started.callback(self._finish_writing)
            self._closing = started.pop_all()

    def add(self, tracker: Tracker) -> None:
        """Add a backend. `close` also closes it."""
        if missing := [name for name in ("log", "truncate_after", "close") if not hasattr(tracker, name)]:
            raise ConfigError(
                f"the tracker {type(tracker).__name__} has no method {' and no '.join(missing)}; see "
                "skyrl_train.tracking.Tracker"
            )
        self._trackers.append(tracker)
        self._closing.callback(tracker.close)

    def log(self, metrics: Mapping[str, float], step: int, commit: bool = True) -> None:
        """Log a step's metrics to all backends. With `commit=False`, keep them until the next committed call.

        Raises:
            OSError: this or an earlier write failed. Raised only after all backends were called.
        """
        self._uncommitted |= metrics
        if not commit:
            return
        metrics, self._uncommitted = self._uncommitted, {}
        failures = []
        for tracker in self._trackers:
            try:
                if isinstance(tracker, MetricsFile | TensorBoardTracker):
                    self._writer.submit(partial(tracker.log, metrics, step))
                else:
                    with Wait(TRACKER, type(tracker).__name__, f"log of step {step}"):
                        tracker.log(metrics, step)
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def flush(self) -> None:
        """Wait until all metrics have been written or have failed. Raise OSError if the disk does not respond."""
        with Wait(TRACKER, "metrics", "flush", TIMEOUT_S):
            self._writer.flush()

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Log a checkpoint as a wandb artifact, if wandb is a backend."""
        for tracker in self._trackers:
            if isinstance(tracker, WandbTracker):
                tracker.log_checkpoint(path, step)

    def truncate_after(self, step: int) -> None:
        """Drop everything logged after `step`, because the run resumes from its checkpoint."""
        self.flush()
        for tracker in self._trackers:
            tracker.truncate_after(step)

    def close(self) -> None:
        """Close every backend. Safe to call twice."""
        with Wait(TRACKER, "all trackers", "close"):
            self._closing.close()

    def _finish_writing(self) -> None:
        try:
            self._writer.close()
        except OSError as error:  # not lost: closing a metrics file retries the write, or raises
            logger.warning("Metrics could not be written when they were logged: %s", error)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except OSError as failure:
            if error is None:
                raise
            logger.warning("The last metrics could not be written: %s", failure)  # must not hide `error`
