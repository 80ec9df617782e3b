"""Base classes for training runs and their callbacks."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, Protocol

import psutil
import torch
import yaml

from skyrl_report.remote import STORAGE_ERRORS, RemoteFolder
from skyrl_train.checkpoint import (
    CheckpointStore,
    CheckpointWriter,
    RemoteCheckpoints,
    Snapshot,
    make_folder,
    open_folder,
    step_of,
    to_bytes,
    write_complete,
)
from skyrl_train.config import changed_settings, to_yaml
from skyrl_train.config.run import RunConfig
from skyrl_train.errors import CheckpointError, ConfigError, DivergenceError, StorageError
from skyrl_train.learner import TrainedModels
from skyrl_train.out_of_memory import is_out_of_memory
from skyrl_train.plan import TrainingPlan
from skyrl_train.plan.hardware import free_host_bytes
from skyrl_train.timer import StepTimer, peak_memory
from skyrl_train.types import Metrics, TrainingBatch, Trajectory, TrajectoryID
from skyrl_train.watchdog import CALLBACK, CHECKPOINT, Wait
from skyrl_train.workers.random_state import random_state, set_random_state

logger = logging.getLogger(__name__)


class Position(Protocol):
    """The position of a run in its data."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position. Raise DataError if it belongs to other data."""


@dataclass(slots=True)
class Step:
    """A step in progress. It is passed to each stage, because steps may overlap."""

    number: int
    metrics: Metrics = field(default_factory=Metrics)
    played: Sequence[Trajectory] = ()
    trained: Sequence[Trajectory] = ()
    """The trajectories of the batch, in the order of its rows."""
    batch: TrainingBatch | None = None
    """The batch with advantages."""
    ends_epoch: bool = False
    timer: StepTimer = field(default_factory=StepTimer)

    def advantages(self) -> dict[TrajectoryID, list[list[float]]]:
        """Return the advantages of the trained trajectories: {} before there are any, or if rows were dropped."""
        segments = [(t.id, segment.response_length) for t in self.trained for segment in t.segments]
        if self.batch is None or self.batch.advantages is None or len(self.batch) != len(segments):
            return {}
        found: dict[TrajectoryID, list[list[float]]] = {}
        for (name, length), row in zip(segments, self.batch.advantages, strict=True):
            found.setdefault(name, []).append(row[:length].tolist())
        return found

    def record(self, metrics: Metrics | Mapping[str, float]) -> None:
        """Add the metrics of a stage. Plain numbers with the same name are averaged over the step."""
        self.metrics = self.metrics.merge(metrics if isinstance(metrics, Metrics) else Metrics.of(metrics))


@dataclass(slots=True)
class StepReport:
    """The report of one step. Callbacks may add metrics. Step 0 is the state before training, without trajectories."""

    global_step: int
    is_last: bool
    metrics: dict[str, float]
    trajectories: Sequence[Trajectory] = ()
    timer: StepTimer = field(default_factory=StepTimer)
    advantages: Callable[[], dict[TrajectoryID, list[list[float]]]] = dict
    """Returns the advantages of the trained trajectories, for each token of each segment."""


class Callback:
    """Base class of callbacks. All hooks do nothing by default."""

    async def on_train_start(self, run: Run) -> None:
        """Called before the first step, after a resume."""

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        """Called after each step, once the engines have the new weights."""

    async def before_checkpoint(self, run: Run) -> None:
        """Called before a checkpoint is committed. Flush buffered data, as a resumed run does not produce it again."""

    async def on_checkpoint(self, run: Run, path: Path) -> None:
        """Called once the checkpoint at `path` is complete and a resume would load it.

        Training may be ahead of it. `step_of(path)` is the checkpoint's step.
        """

    async def on_alert(self, run: Run, text: str) -> None:
        """Called when storage fails but the run continues. `text` says what failed and what happens next."""

    async def on_train_end(self, run: Run, error: BaseException | None) -> None:
        """Called when the run ends. `error` is the exception or interrupt that ended it, None after the last step."""


class _FinishedState(NamedTuple):
    """The state after the last finished step, kept while the next step changes it."""

    n_optimizer_steps: int
    driver: dict[str, Any]


class Run(ABC):
    """A training run: step loop, callbacks, checkpoints, exports. Trainers subclass it, and callbacks receive it."""

    def __init__(
        self, cfg: Any, *, models: TrainedModels, position: Position, total_steps: int, callbacks: Sequence[Callback]
    ) -> None:
        self.cfg = cfg
        """The `SkyRLConfig` or `SupervisedConfig`."""
        self.models = models
        self.total_steps = total_steps
        """Number of steps in the run."""
        self.global_step = 0
        """The last finished step, or 0 before the first."""
        self.changes: list[str] = []
        """Settings changed since the checkpoint that the run resumed from, e.g. `trainer.seed: 1 -> 2`."""
        self.gauges: dict[str, float] = {}
        """Metrics added to every report from now on."""
        self._finished: _FinishedState | None = None  # of the last finished step, while the next one runs
        self._stop = asyncio.Event()
        self._position = position
        self._callbacks = callbacks
        trainer: RunConfig = cfg.trainer
        self.remote = _open_remote(trainer, cfg.trainer.policy.model.path)
        """The run's checkpoints in remote storage. None without `trainer.remote_ckpt_url` or credentials."""
        keeps_one = self.remote is not None and trainer.max_ckpts_to_keep < 0
        n_kept = 1 if keeps_one else trainer.max_ckpts_to_keep
        self.checkpoints = CheckpointStore(Path(trainer.ckpt_path), n_kept, trainer.resume_mode, trainer.resume_path)
        """The checkpoints on this machine."""
        self._writer = CheckpointWriter(self.checkpoints, trainer.ckpt_timeout_seconds, self.alert)

    @abstractmethod
    async def train(self) -> None:
        """Train from the last checkpoint, or from the start, to the last step."""

    @asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """Call `on_train_end` of every callback when the context exits, with the error that ended it."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            if is_out_of_memory(raised):
                await self._save_after_shortage()
            raise
        finally:
            try:
                await self._writer.finish()
            except Exception:  # must not hide why the run ended
                logger.exception("The last checkpoint could not be written")
            for callback in self._callbacks:
                try:
                    with Wait(CALLBACK, type(callback).__name__, "on_train_end"):
                        await callback.on_train_end(self, error)
                except OSError as failure:  # e.g. the full disk that ended the run
                    logger.warning("%s failed at the end of the run: %s", type(callback).__name__, failure)
                except Exception:  # a failing callback must not hide why the run ended
                    logger.exception("%s failed at the end of the run", type(callback).__name__)

    @property
    def is_stopping(self) -> bool:
        """True after a stop request."""
        return self._stop.is_set()

    def request_stop(self, reason: str) -> None:
        """Stop after the current step and save it, or abandon the step if its rollouts do not end in time."""
        self._stop.set()
        logger.warning("Stopping after the current step: %s", reason)

    async def start(self) -> None:
        """Resume from a checkpoint if there is one. Otherwise report step 0."""
        await self.resume()
        if self.global_step >= self.total_steps:
            logger.warning(
                "This run has already finished its %d steps. To start a new one, set trainer.run_name; to continue "
                "this one, raise trainer.epochs or trainer.max_training_steps",
                self.total_steps,
            )
        step = Step(self.global_step)
        await self.prepare(step)
        for callback in self._callbacks:
            with Wait(CALLBACK, type(callback).__name__, "on_train_start"):
                await callback.on_train_start(self)
        if self.global_step == 0:
            await self.finish_step(step)

    async def prepare(self, step: Step) -> None:  # noqa: B027, runs without an engine have nothing to prepare
        """Prepare the first step after a resume. `step` is the last finished step."""

    def steps(self) -> Iterator[Step]:
        """Yield the remaining steps, until a callback or a signal requests a stop."""
        while self.global_step < self.total_steps and not self.is_stopping:
            self._finished = _FinishedState(self.models.n_optimizer_steps, self._driver_state())
            yield Step(self.global_step + 1)

    async def finish_step(self, step: Step) -> None:
        """Report the step to the callbacks.

        If a callback raises an OSError or a CheckpointError, the run continues with an alert. At the last step, or
        after a stop request, the error ends the run, but only after the remaining callbacks: if metrics cannot be
        written to a full disk, a checkpoint on another disk must still be saved.

        Raises:
            StorageError, CheckpointError: a callback failed at the end of the run. The first failure is raised.
            DivergenceError: the weights are NaN or infinite, so no checkpoint was written.
        """
        self.global_step, self._finished = step.number, None
        is_last = step.number == self.total_steps
        failures: list[tuple[str, Exception]] = []
        gauges = self.gauges | self.models.memory_metrics() if step.number > 0 else {}
        metrics = step.metrics.numbers() | gauges
        report = StepReport(step.number, is_last, metrics, step.played, step.timer, step.advantages)
        for callback in self._callbacks:
            try:
                with Wait(CALLBACK, type(callback).__name__, f"on_step_end of step {step.number}"):
                    await callback.on_step_end(self, report)
            except (OSError, CheckpointError) as error:
                text = f"{type(callback).__name__} failed at step {step.number}: {error}"
                if is_last or self.is_stopping:
                    logger.warning("Storage: %s", text)
                    failures.append((text, error))
                else:
                    await self.alert(f"{text}. Training continues")
        if failures:
            text, failure = failures[0]
            if isinstance(failure, CheckpointError):
                raise failure
            rerun = self.checkpoints.describe_rerun()
            raise StorageError(
                f"{text}. Free disk space or make the folder writable, then rerun the command: it {rerun}"
            ) from failure

    async def alert(self, text: str) -> None:
        """Report a problem that does not end the run: in the log, in `storage/alerts`, and to `on_alert`."""
        logger.warning("Storage: %s", text)
        self.gauges["storage/alerts"] = self.gauges.get("storage/alerts", 0.0) + 1
        for callback in self._callbacks:
            await callback.on_alert(self, text)

    # -- checkpoints and exports

    async def save_checkpoint(self) -> None:
        """Write everything that a resumed run needs to continue exactly, then call `on_checkpoint`.

        Raises:
            CheckpointError: the write failed. The last checkpoint is intact.
            DivergenceError: the weights are NaN or infinite, or can no longer learn. The last checkpoint is intact.
        """
        await self._writer.finish()
        await self.check_weights(self.global_step)
        await self._writer.save(await self._snapshot())

    async def begin_checkpoint(self) -> None:
        """Copy the state that `save_checkpoint` writes, and write it while training continues.

        A failed write is an alert, not an error. If the disk needs longer than `trainer.ckpt_timeout_seconds` to finish
        the previous checkpoint and start this one, the step is not saved, which is also an alert.

        Raises:
            DivergenceError: as in `save_checkpoint`.
        """
        if await self._writer.finish_within_limit(self.global_step):
            await self.check_weights(self.global_step)
            await self._writer.begin(await self._snapshot())

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint is written in the background."""
        return self._writer.is_saving

    async def make_room(self) -> None:
        """Before an update, wait for the checkpoint in progress if its copy leaves too little host memory.

        Without a GPU, an update takes about as much memory as the highest peak so far.
        """
        if self.is_saving and not torch.cuda.is_available():
            needed = peak_memory.measure() - psutil.Process().memory_info().rss
            if free_host_bytes() < needed:
                logger.info("Waiting for the checkpoint in progress, because the update needs the memory of its copy")
                await self._writer.finish()

    async def _snapshot(self) -> Snapshot:
        """Capture the complete state after the last finished step, so a resumed run continues exactly from there."""
        state = self._driver_state() if self._finished is None else self._finished.driver
        driver = to_bytes({**state, "config": to_yaml(self.cfg)})
        started = time.monotonic()

        async def copy(folder: Path) -> Awaitable[None]:
            with (copying := StepTimer())("checkpoint_pause"):
                writing = await self.models.save(folder)
            self.gauges |= copying.metrics()

            async def write() -> None:
                await writing
                for callback in self._callbacks:
                    await callback.before_checkpoint(self)
                await asyncio.to_thread((folder / "driver.pt").write_bytes, driver)

            return write()

        async def on_saved(path: Path) -> None:
            self.gauges["timing/save_checkpoint"] = time.monotonic() - started
            for callback in self._callbacks:
                await callback.on_checkpoint(self, path)

        return Snapshot(self.global_step, self.models.checkpoint_bytes, copy, on_saved)

    def _driver_state(self) -> dict[str, Any]:
        """Return the state outside the models' weights and optimizers."""
        return {
            "global_step": self.global_step,
            "source": self._position.state_dict(),
            "learner": self.models.state_dict(),
            "rng": random_state(),
        }

    async def check_weights(self, step: int) -> None:
        """Raise DivergenceError if training has diverged at `step`. The message names the last kept checkpoint."""
        try:
            await self.models.check_weights()
        except DivergenceError as error:
            await self._writer.finish()
            last = self.checkpoints.resumable_step()
            kept = "there is no earlier checkpoint" if last is None else f"the checkpoint of step {last} is kept"
            raise DivergenceError(
                f"in step {step}, {error}; {kept}. The same command would diverge again: start a new run with a lower "
                "learning rate, from the start or from a checkpoint (docs/guides/debugging.md#divergence)"
            ) from error

    async def save_before_failure(self) -> None:
        """Save the last finished step when the next one fails before its update, so a resumed run loses no step."""
        if self.cfg.trainer.ckpt_interval > 0:
            try:
                await self.save_checkpoint()
            except CheckpointError as error:
                logger.warning("Step %d is not saved: %s", self.global_step, error)
            else:
                rerun = self.checkpoints.describe_rerun()
                logger.warning("Saved the checkpoint at step %d. Rerun the command: it %s", self.global_step, rerun)

    async def _save_after_shortage(self) -> None:
        """Save the last finished step after memory ran out, unless the weights have changed since then."""
        finished = self._finished
        if finished is not None and finished.n_optimizer_steps != self.models.n_optimizer_steps:
            logger.warning("Step %d had begun to change the weights, so no checkpoint is saved", self.global_step + 1)
            return
        try:
            await self._writer.finish()
            if 0 < self.global_step != self.checkpoints.resumable_step():
                await self.save_before_failure()
        except Exception as error:  # noqa: BLE001, must not hide why the run ended
            logger.warning("Step %d is not saved: %s", self.global_step, error)

    async def check_space(self) -> None:
        """Check the free disk space before the first step. Too little space for the exports only raises an alert.

        Raises:
            CheckpointError: there is no room for a second checkpoint next to the last one.
        """
        checkpoint_bytes, trainer = self.models.checkpoint_bytes, self.cfg.trainer
        self.checkpoints.check_space(checkpoint_bytes)
        if trainer.hf_save_interval > 0:
            folder = Path(trainer.export_path)
            make_folder(folder)
            n_exports = math.ceil((self.total_steps - self.global_step) / trainer.hf_save_interval)
            planned = TrainingPlan(self.cfg).forecast_disk(counts_steps=False)
            n_bytes = checkpoint_bytes // 3 if planned is None else planned.export_bytes  # no optimizer moments
            needed, free = n_exports * n_bytes, shutil.disk_usage(folder).free
            if free < needed:
                await self.alert(
                    f"{folder} has {free:,} bytes free, and the {n_exports} exports of this run take at least "
                    f"{needed:,}; raise trainer.hf_save_interval, or set trainer.export_path to a larger disk"
                )

    async def export(self, folder: Path) -> None:
        """Export the models as plain Hugging Face folders under `folder`. If that fails, remove the partial folder.

        Raises:
            CheckpointError: the write failed.
            DivergenceError: the weights are NaN or infinite, or can no longer learn.
        """
        await self.check_weights(self.global_step)
        try:
            await write_complete(folder, self.models.export)
        except OSError as error:
            raise CheckpointError(
                f"cannot export step {self.global_step} to {folder}: {error}. Free disk space, or set "
                f"trainer.export_path to a larger disk, then rerun the command: it {self.checkpoints.describe_rerun()}"
            ) from error

    async def resume(self) -> None:
        """Load the checkpoint that `trainer.resume_mode` selects, if any. Download it if necessary."""
        mode, path, downloaded = self.cfg.trainer.resume_mode, self.cfg.trainer.resume_path, None
        if mode == "latest" and self.remote is not None:
            await self._fetch_newer(self.remote)
        elif mode == "from_path" and "://" in path:
            parent, _, name = path.rstrip("/").rpartition("/")
            downloaded = await self._fetch(RemoteCheckpoints(RemoteFolder(parent)), step_of(Path(name)))
        folder = self.checkpoints.find(downloaded)
        if folder is None:
            return
        await self.checkpoints.verify(folder)
        try:
            state = torch.load(folder / "driver.pt", weights_only=True)
            self.models.load_state_dict(state["learner"])
        except (OSError, RuntimeError, EOFError, KeyError, UnpicklingError) as error:
            raise CheckpointError(
                f"cannot resume from {folder}: {error!r}; if another version wrote it, finish the run with that version"
            ) from error
        saved = yaml.safe_load(state["config"])
        trainer, batch_size = self.cfg.trainer, saved["trainer"]["train_batch_size"]
        # The last step depends on the batch size if `trainer.epochs` ends the run.
        if trainer.train_batch_size != batch_size and self.total_steps != trainer.max_training_steps:
            raise CheckpointError(
                f"cannot resume from {folder} with trainer.train_batch_size={trainer.train_batch_size}, because it was "
                f"saved with {batch_size} and the last step of trainer.epochs={trainer.epochs} is unknown; set "
                f"trainer.train_batch_size={batch_size}, or set trainer.max_training_steps to the last step, at most "
                f"{self.total_steps}"
            )
        self._position.load_state_dict(state["source"])
        await self.models.restore(folder)
        set_random_state(state["rng"])
        self.global_step = state["global_step"]
        logger.info("Resumed from %s", folder)
        self.changes = changed_settings(saved, self.cfg.model_dump(mode="json"))
        for line in self.changes:
            logger.warning("Changed since the checkpoint: %s", line)

    async def _fetch_newer(self, remote: RemoteCheckpoints) -> None:
        """Download the latest complete remote checkpoint if it is newer than the local ones."""
        local = self.checkpoints.resumable_step()
        try:
            with Wait(CHECKPOINT, remote.folder.url, "list of steps"):
                step = await asyncio.to_thread(remote.latest_step)
        except STORAGE_ERRORS as error:
            if local is None:
                raise CheckpointError(
                    f"cannot list checkpoints in {remote.folder.url}: {error!r}. Check the URL and the network, or "
                    "set trainer.resume_mode=none to start again"
                ) from error
            await self.alert(
                f"{remote.folder.url} cannot be read: {error!r}; the run resumes from its local step {local}"
            )
            return
        if step is not None and (local is None or step > local):
            await self._fetch(remote, step)

    async def _fetch(self, remote: RemoteCheckpoints, step: int) -> Path:
        """Download a checkpoint. If that fails, keep nothing and raise CheckpointError."""
        logger.info("Downloading the checkpoint at step %d from %s", step, remote.folder.url)

        async def write(folder: Path) -> None:
            await asyncio.to_thread(remote.download, step, folder)

        try:
            with Wait(CHECKPOINT, remote.folder.url, f"download of step {step}"):
                return await self.checkpoints.receive(step, write, await asyncio.to_thread(remote.size, step))
        except STORAGE_ERRORS as error:
            raise CheckpointError(
                f"cannot download the checkpoint of step {step} from {remote.folder.url}: {error!r}. Check the network "
                "and the free space, then rerun the command"
            ) from error


def _open_remote(trainer: RunConfig, model: str) -> RemoteCheckpoints | None:
    """Open the run's folder under `remote_ckpt_url`, if that is set. ConfigError if its protocol has no client."""
    root = open_folder(trainer.remote_ckpt_url, "trainer.remote_ckpt_url", "checkpoints")
    if root is None:
        return None
    folder = root / f"{trainer.project_name}/{model.rstrip('/').rpartition('/')[2]}/{trainer.run_name}"
    try:
        folder.connect()
    except STORAGE_ERRORS as error:
        raise ConfigError(f"trainer.remote_ckpt_url: cannot open {folder.url}: {error}") from error
    logger.info("Checkpoints are uploaded to %s", folder.url)
    return RemoteCheckpoints(folder)
