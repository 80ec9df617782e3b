"""The frame of every training run: steps, callbacks, checkpoints and exports. A trainer fills in the step."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
import yaml

from skyrl_train.callbacks import Callback, StepReport
from skyrl_train.checkpoint import (
    STORAGE_ERRORS,
    CheckpointStore,
    RemoteCheckpoints,
    RemoteFolder,
    find_credentials_fault,
    make_folder,
    step_of,
    to_bytes,
    write_complete,
)
from skyrl_train.config import changed_settings, to_yaml
from skyrl_train.config.run import RunConfig
from skyrl_train.errors import CheckpointError, ConfigError, DivergenceError, StorageError
from skyrl_train.learner import TrainedModels
from skyrl_train.timer import StepTimer
from skyrl_train.types import Metrics, Trajectory
from skyrl_train.workers.random_state import random_state, set_random_state

logger = logging.getLogger(__name__)


class Position(Protocol):
    """The position of a run in its data."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position; DataError if it belongs to other data."""
        ...


@dataclass(slots=True)
class Step:
    """A step in progress. Stages take it as an argument, so that several steps may overlap."""

    number: int
    metrics: Metrics = field(default_factory=Metrics)
    played: Sequence[Trajectory] = ()
    ends_epoch: bool = False
    timer: StepTimer = field(default_factory=StepTimer)

    def record(self, metrics: Metrics | Mapping[str, float]) -> None:
        """Add the metrics of a stage. Plain numbers with the same name are averaged over the step."""
        self.metrics = self.metrics.merge(metrics if isinstance(metrics, Metrics) else Metrics.of(metrics))


class _Copying:
    """The copy of the models for a checkpoint: nothing may change them between its begin and its end."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()  # cancelled if it must not begin any more
        self.ended: asyncio.Future[None] = loop.create_future()


class TrainingRun(ABC):
    """A run of `total_steps` steps. Callbacks see it as a `Run`."""

    def __init__(
        self,
        cfg: Any,  # SkyRLConfig or SupervisedConfig
        *,
        models: TrainedModels,
        position: Position,
        total_steps: int,
        callbacks: Sequence[Callback],
    ) -> None:
        self.cfg = cfg
        self.models = models
        self.total_steps = total_steps
        self.global_step = 0  # the last finished step
        self.changes: list[str] = []
        self._stop = asyncio.Event()
        self._position = position
        self._callbacks = callbacks
        self.gauges: dict[str, float] = {}
        self._saving: asyncio.Task[None] | None = None
        self._disk_wait_s = 0.0  # seconds that training may still wait for this checkpoint
        trainer: RunConfig = cfg.trainer
        self.remote = open_remote(trainer.remote_url(cfg.trainer.policy.model.path))
        keeps_one = self.remote is not None and trainer.max_ckpts_to_keep < 0
        n_kept = 1 if keeps_one else trainer.max_ckpts_to_keep
        self.checkpoints = CheckpointStore(Path(trainer.ckpt_path), n_kept, trainer.resume_mode, trainer.resume_path)

    @abstractmethod
    async def train(self) -> None:
        """Train from the last checkpoint, or from the start, to the last step."""

    @asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """Call `on_train_end` of every callback at the end of the context, with the error that ended it."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            try:
                await self._finish_save()
            except Exception:  # must not hide why the run ended
                logger.exception("The last checkpoint could not be written")
            for callback in self._callbacks:
                try:
                    await callback.on_train_end(self, error)
                except OSError as failure:  # e.g. the disk is full, which ended the run
                    logger.warning("%s failed at the end of the run: %s", type(callback).__name__, failure)
                except Exception:  # a failing callback must not hide why the run ended
                    logger.exception("%s failed at the end of the run", type(callback).__name__)

    @property
    def is_stopping(self) -> bool:
        """A stop was requested."""
        return self._stop.is_set()

    def request_stop(self, reason: str) -> None:
        """Stop after the current step, with a checkpoint of it; abandon it if its rollouts do not end in time."""
        self._stop.set()
        logger.warning("Stopping after the current step: %s", reason)

    async def start(self) -> None:
        """Resume from a checkpoint if there is one, and report step 0 of a new run."""
        await self.resume()
        if self.global_step >= self.total_steps:
            logger.warning(
                "This run is finished after its %d steps. Set trainer.run_name to start another; raise trainer.epochs "
                "or trainer.max_training_steps to continue it",
                self.total_steps,
            )
        step = Step(self.global_step)
        await self.prepare(step)
        for callback in self._callbacks:
            await callback.on_train_start(self)
        if self.global_step == 0:
            await self.finish_step(step)

    async def prepare(self, step: Step) -> None:  # noqa: B027, not every run prepares
        """Do what the first step needs after resuming; `step` is the last finished one."""

    def steps(self) -> Iterator[Step]:
        """Yield the steps that remain, until a callback or a signal requests a stop."""
        while self.global_step < self.total_steps and not self.is_stopping:
            yield Step(self.global_step + 1)

    async def finish_step(self, step: Step) -> None:
        """Report the step to the callbacks.

        An OSError in a callback is an alert. At the last step it ends the run, but only after the remaining callbacks:
        if metrics cannot be written to a full disk, a checkpoint on another disk must still be saved.

        Raises:
            StorageError, CheckpointError: the first failure of the last step.
        """
        self.global_step = step.number
        is_last = step.number == self.total_steps
        failures: list[tuple[str, Exception]] = []
        report = StepReport(step.number, is_last, step.metrics.numbers() | self.gauges, step.played, step.timer)
        for callback in self._callbacks:
            try:
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
                f"{text}. Free disk space, or make it writable; the same command then {rerun}"
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
            CheckpointError: the disk refused; the last checkpoint is intact.
            DivergenceError: the weights are NaN or infinite, or can no longer learn; the last checkpoint is intact.
        """
        await self._finish_save()
        await self.check_weights(self.global_step)
        await self._save(_Copying())

    async def begin_checkpoint(self) -> None:
        """Copy what `save_checkpoint` writes, and write it while training continues.

        A failure to write it is an alert. So is a disk that takes longer than `trainer.ckpt_timeout_seconds` to finish
        the previous checkpoint and to begin this one: then this step is not saved.

        Raises:
            DivergenceError: as in `save_checkpoint`.
        """
        if self._saving is not None:
            if not await self._wait_for_disk(self._saving):
                return
            await self._finish_save()
        await self.check_weights(self.global_step)
        copying = _Copying()
        self._saving = asyncio.create_task(self._save_or_alert(copying))
        self._disk_wait_s = self.cfg.trainer.ckpt_timeout_seconds
        is_ready = await self._wait_for_disk(self._saving, copying.begun)
        if is_ready or not copying.begun.cancel():  # it may have begun meanwhile
            await asyncio.wait([self._saving, copying.ended], return_when=asyncio.FIRST_COMPLETED)
            if not copying.ended.done():
                await self._finish_save()

    async def _wait_for_disk(self, *awaited: asyncio.Future[None]) -> bool:
        """Wait for one of the futures; False, with an alert, after `trainer.ckpt_timeout_seconds` for a checkpoint."""
        if any(future.done() for future in awaited):
            return True
        started, could_wait = time.monotonic(), self._disk_wait_s > 0
        done, _ = await asyncio.wait(awaited, timeout=self._disk_wait_s, return_when=asyncio.FIRST_COMPLETED)
        self._disk_wait_s = max(0.0, self._disk_wait_s - (time.monotonic() - started))
        if not done and could_wait:
            await self.alert(
                f"step {self.global_step} is not saved, because writing a checkpoint to {self.checkpoints.path} takes "
                f"longer than trainer.ckpt_timeout_seconds={self.cfg.trainer.ckpt_timeout_seconds:g}. Training "
                "continues, and steps are saved again once it is written"
            )
        return bool(done)

    @property
    def is_saving(self) -> bool:
        """A checkpoint is being written in the background."""
        return self._saving is not None and not self._saving.done()

    async def _finish_save(self) -> None:
        """Wait until the checkpoint in the background is written."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    async def _save_or_alert(self, copying: _Copying) -> None:
        try:
            await self._save(copying)
        except CheckpointError as error:
            await self.alert(f"{error}. Training continues, and the next step is saved instead")

    async def _save(self, copying: _Copying) -> None:
        """Save the last finished step; training may change the weights once `copying` has ended."""
        step = self.global_step
        driver = to_bytes(
            {
                "global_step": step,
                "config": to_yaml(self.cfg),
                "source": self._position.state_dict(),
                "learner": self.models.state_dict(),
                "rng": random_state(),
            }
        )
        started = time.monotonic()

        async def write(folder: Path) -> None:
            if copying.begun.cancelled():
                raise CheckpointError(f"step {step} is not saved, because {folder.parent} responded too late")
            copying.begun.set_result(None)
            writing = await self.models.save(folder)
            self.gauges["timing/checkpoint_pause"] = time.monotonic() - started
            copying.ended.set_result(None)
            await writing
            for callback in self._callbacks:
                await callback.before_checkpoint(self)
            await asyncio.to_thread((folder / "driver.pt").write_bytes, driver)

        path = await self.checkpoints.save(step, write, await self.models.checkpoint_bytes())
        self.gauges["timing/save_checkpoint"] = time.monotonic() - started
        for callback in self._callbacks:
            await callback.on_checkpoint(self, path)

    async def check_weights(self, step: int) -> None:
        """Check the weights after the update of `step`.

        Raises:
            DivergenceError: training has diverged; the message says what remains of the run.
        """
        try:
            await self.models.check_weights()
        except DivergenceError as error:
            await self._finish_save()
            last = self.checkpoints.resumable_step()
            kept = "there is no earlier checkpoint" if last is None else f"the checkpoint of step {last} is kept"
            raise DivergenceError(
                f"in step {step}, {error}; {kept}. The same command would diverge again: start a new run with a lower "
                "learning rate, from the start or from a checkpoint (docs/guides/debugging.md#divergence)"
            ) from error

    async def save_before_failure(self) -> None:
        """Save the last finished step, whose weights are unchanged, so that a resumed run loses none."""
        if self.cfg.trainer.ckpt_interval > 0:
            try:
                await self.save_checkpoint()
            except CheckpointError as error:
                logger.warning("Step %d is not saved: %s", self.global_step, error)
            else:
                rerun = self.checkpoints.describe_rerun()
                logger.warning("The checkpoint of step %d is saved; the same command %s", self.global_step, rerun)

    async def check_space(self) -> None:
        """Check the disk before the first step; warn if it has no room for all exports.

        Raises:
            CheckpointError: it has no room for a checkpoint beside the last one.
        """
        checkpoint_bytes, trainer = await self.models.checkpoint_bytes(), self.cfg.trainer
        self.checkpoints.check_space(checkpoint_bytes)
        if trainer.hf_save_interval > 0:
            folder = Path(trainer.export_path)
            make_folder(folder)
            n_exports = math.ceil((self.total_steps - self.global_step) / trainer.hf_save_interval)
            needed, free = n_exports * checkpoint_bytes // 3, shutil.disk_usage(folder).free  # without the two moments
            if free < needed:
                await self.alert(
                    f"{folder} has {free:,} bytes free, and the {n_exports} exports of this run take at least "
                    f"{needed:,}; raise trainer.hf_save_interval, or set trainer.export_path to a larger disk"
                )

    async def export(self, folder: Path) -> None:
        """Write the models as plain Hugging Face folders into `folder`, complete or not at all.

        Raises:
            CheckpointError: the disk refused.
            DivergenceError: the weights are NaN or infinite, or can no longer learn.
        """
        await self.check_weights(self.global_step)
        try:
            await write_complete(folder, self.models.export)
        except OSError as error:
            raise CheckpointError(
                f"cannot export step {self.global_step} to {folder}: {error}. Free disk space, or set "
                f"trainer.export_path to a larger disk; the same command then {self.checkpoints.describe_rerun()}"
            ) from error

    async def resume(self) -> None:
        """Load the checkpoint that `trainer.resume_mode` asks for, if there is one; download it if necessary."""
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
        self._check_batch_size(folder, saved["trainer"]["train_batch_size"])
        self._position.load_state_dict(state["source"])
        await self.models.restore(folder)
        set_random_state(state["rng"])
        self.global_step = state["global_step"]
        logger.info("Resumed from %s", folder)
        self.changes = changed_settings(saved, self.cfg.model_dump(mode="json"))
        for line in self.changes:
            logger.warning("Changed since the checkpoint: %s", line)

    def _check_batch_size(self, folder: Path, saved: int) -> None:
        """Raise CheckpointError if the batch size has changed and epochs, not `max_training_steps`, end the run."""
        trainer = self.cfg.trainer
        if trainer.train_batch_size != saved and self.total_steps != trainer.max_training_steps:
            raise CheckpointError(
                f"cannot resume from {folder} with trainer.train_batch_size={trainer.train_batch_size}, because it was "
                f"saved with {saved} and the last step of trainer.epochs={trainer.epochs} is unknown; set "
                f"trainer.train_batch_size={saved}, or set trainer.max_training_steps to the last step, at most "
                f"{self.total_steps}"
            )

    async def _fetch_newer(self, remote: RemoteCheckpoints) -> None:
        """Download the newest complete checkpoint if this machine has none that is as new."""
        local = self.checkpoints.resumable_step()
        try:
            step = await asyncio.to_thread(remote.latest_step)
        except STORAGE_ERRORS as error:
            if local is None:
                raise CheckpointError(
                    f"cannot look for checkpoints in {remote.folder.url}: {error!r}. Check the URL and the network, or "
                    "set trainer.resume_mode=none to start again"
                ) from error
            await self.alert(
                f"{remote.folder.url} cannot be read: {error!r}; the run resumes from its local step {local}"
            )
            return
        if step is not None and (local is None or step > local):
            await self._fetch(remote, step)

    async def _fetch(self, remote: RemoteCheckpoints, step: int) -> Path:
        """Download a checkpoint, complete or not at all; CheckpointError if that fails."""
        logger.info("Downloading the checkpoint of step %d from %s", step, remote.folder.url)

        async def write(folder: Path) -> None:
            await asyncio.to_thread(remote.download, step, folder)

        try:
            return await self.checkpoints.receive(step, write, await asyncio.to_thread(remote.size, step))
        except STORAGE_ERRORS as error:
            raise CheckpointError(
                f"cannot download the checkpoint of step {step} from {remote.folder.url}: {error!r}. Check the network "
                "and the free space, then rerun the command"
            ) from error


def open_remote(url: str | None) -> RemoteCheckpoints | None:
    """Return the checkpoints at a URL; None, with a warning, if there are no credentials for it.

    Raises:
        ConfigError: the protocol is unknown, or its package is not installed.
    """
    if url is None:
        return None
    if fault := find_credentials_fault(url, os.environ):
        logger.warning("trainer.remote_ckpt_url is set, but checkpoints stay on this machine: %s", fault)
        return None
    folder = RemoteFolder(url)
    try:
        folder.connect()
    except STORAGE_ERRORS as error:
        raise ConfigError(f"trainer.remote_ckpt_url: cannot open {url}: {error}") from error
    logger.info("Checkpoints are uploaded to %s", url)
    return RemoteCheckpoints(folder)
