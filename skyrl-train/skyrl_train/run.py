"""The frame of every training run: steps, callbacks, checkpoints and exports. A trainer fills in the step."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
import yaml

from skyrl_train.callbacks import Callback, StepReport
from skyrl_train.checkpoint import CheckpointStore, write_complete
from skyrl_train.config import changed_settings, to_yaml
from skyrl_train.config.run import RunConfig
from skyrl_train.errors import CheckpointError, DivergenceError
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

    def record(self, metrics: Metrics) -> None:
        """Add the metrics of a stage."""
        self.metrics = self.metrics.merge(metrics)


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
        self._stop = asyncio.Event()
        self._position = position
        self._callbacks = callbacks
        trainer: RunConfig = cfg.trainer
        self._checkpoints = CheckpointStore(Path(trainer.ckpt_path), trainer.max_ckpts_to_keep)

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
        """Report the step to the callbacks."""
        self.global_step = step.number
        is_last = step.number == self.total_steps
        report = StepReport(step.number, is_last, step.metrics.numbers(), step.played, step.timer)
        for callback in self._callbacks:
            await callback.on_step_end(self, report)

    # -- checkpoints and exports

    async def save_checkpoint(self) -> None:
        """Write everything that a resumed run needs to continue exactly, then call `on_checkpoint`.

        Raises:
            CheckpointError: the disk refused; the last checkpoint is intact.
            DivergenceError: the weights are NaN or infinite, or can no longer learn; the last checkpoint is intact.
        """
        await self.check_weights(self.global_step)

        async def write(folder: Path) -> None:
            state = {
                "global_step": self.global_step,
                "config": to_yaml(self.cfg),
                "source": self._position.state_dict(),
                "learner": self.models.state_dict(),
                "rng": random_state(),
            }
            await self.models.save(folder)
            torch.save(state, folder / "driver.pt")

        path = await self._checkpoints.save(self.global_step, write, await self.models.checkpoint_bytes())
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
            last = self._checkpoints.resumable_step()
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
                logger.warning("The checkpoint of step %d is saved; rerun the command to resume", self.global_step)

    async def check_space(self) -> None:
        """Raise CheckpointError if the disk has no room for a checkpoint beside the last one."""
        self._checkpoints.check_space(await self.models.checkpoint_bytes())

    async def export(self, folder: Path) -> None:
        """Write the models as plain Hugging Face folders into `folder`, complete or not at all.

        Raises:
            CheckpointError: the disk refused.
            DivergenceError: the weights are NaN or infinite, or can no longer learn.
        """
        await self.check_weights(self.global_step)
        try:
            await write_complete(folder, self.models.export)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"cannot export step {self.global_step} to {folder}: {error}. Free disk space, or set "
                f"trainer.export_path to a larger disk; the same command then {self._checkpoints.describe_rerun()}"
            ) from error

    async def resume(self) -> None:
        """Load the checkpoint that `trainer.resume_mode` asks for, if there is one."""
        folder = self._checkpoints.find(self.cfg.trainer.resume_mode, self.cfg.trainer.resume_path)
        if folder is None:
            return
        await self._checkpoints.verify(folder)
        try:
            state = torch.load(folder / "driver.pt", weights_only=True)
            self.models.load_state_dict(state["learner"])
        except (OSError, RuntimeError, EOFError, KeyError, UnpicklingError) as error:
            raise CheckpointError(
                f"cannot resume from {folder}: {error!r}; if another version wrote it, finish the run with that version"
            ) from error
        self._position.load_state_dict(state["source"])
        await self.models.restore(folder)
        set_random_state(state["rng"])
        self.global_step = state["global_step"]
        logger.info("Resumed from %s", folder)
        for line in changed_settings(yaml.safe_load(state["config"]), self.cfg.model_dump(mode="json")):
            logger.warning("Changed since the checkpoint, whose optimizer and schedule continue as they were: %s", line)
