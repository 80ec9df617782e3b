"""The training step on one page: prompts → rollouts → advantages → update → sync.

A step draws P prompts and plays G samples of each. Its batch has B rows of L tokens, the last R of them response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError

import torch
import yaml

from skyrl_train.callbacks import Callback, StepReport
from skyrl_train.checkpoint import CheckpointStore, write_complete
from skyrl_train.config import SkyRLConfig, changed_settings, to_yaml
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.errors import CheckpointError, DivergenceError
from skyrl_train.generators.source import BatchSource, StepData
from skyrl_train.learner import Learner
from skyrl_train.timer import StepTimer
from skyrl_train.types import Metrics, TrainingBatch, Trajectory
from skyrl_train.workers.random_state import random_state, set_random_state

logger = logging.getLogger(__name__)

STOP_GRACE_S = 20.0
"""Seconds that the rollouts of a step may take after a stop request, before the step is abandoned."""


class RolloutsAbandonedError(Exception):
    """The rollouts of a step did not end in time after a stop request."""


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


class Trainer:
    """A trainer of a policy on the rewards of its own rollouts. Callbacks see it as a `Run`."""

    def __init__(
        self,
        cfg: SkyRLConfig,
        *,
        source: BatchSource,
        learner: Learner,
        sync_engines: Callable[[int], Awaitable[None]],
        total_steps: int,
        pad_token_id: int,
        callbacks: Sequence[Callback],
    ) -> None:
        """Create the trainer. `sync_engines(version)` sends the policy's weights to the engines."""
        self.cfg = cfg
        self.learner = learner
        self.total_steps = total_steps
        self.global_step = 0  # the last finished step
        self._stop = asyncio.Event()
        self._source = source
        self._sync_engines = sync_engines
        self._pad_token_id = pad_token_id
        self._callbacks = callbacks
        self._checkpoints = CheckpointStore(Path(cfg.trainer.ckpt_path), cfg.trainer.max_ckpts_to_keep)

    async def train(self) -> None:
        """Train from the last checkpoint, or from the start, to the last step."""
        error: BaseException | None = None
        try:
            await self.start()
            for step in self.steps():
                with step.timer("step"):
                    rollouts = await self.rollout(step)  # trajectories of P draws
                    batch = self.build_batch(step, rollouts)  # sequences (B, L)
                    batch = await self.score(step, batch)  # values, old and reference log-probs (B, R)
                    batch = self.advantages(step, batch)  # (B, R)
                    await self.update(step, batch)  # epochs × mini-batches of the value and the policy loss
                    await self.sync_weights(step)  # the engines hold version step.number
                await self.finish_step(step)  # callbacks: evaluate, log, checkpoint
        except RolloutsAbandonedError as stopped:
            logger.warning("%s", stopped)
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

    # -- the stages of a step

    async def start(self) -> None:
        """Resume from a checkpoint if there is one, sync the engines, and report step 0 of a new run."""
        await self.resume()
        if self.global_step >= self.total_steps:
            logger.warning(
                "This run is finished after its %d steps. Set trainer.run_name to start another; raise trainer.epochs "
                "or trainer.max_training_steps to continue it",
                self.total_steps,
            )
        step = Step(self.global_step)
        await self.sync_weights(step)
        for callback in self._callbacks:
            await callback.on_train_start(self)
        if self.global_step == 0:
            await self.finish_step(step)

    def steps(self) -> Iterator[Step]:
        """Yield the steps that remain, until a callback or a signal requests a stop."""
        while self.global_step < self.total_steps and not self.is_stopping:
            yield Step(self.global_step + 1)

    async def rollout(self, step: Step) -> list[Trajectory]:
        """Return G trajectories for each of P drawn prompts, without those that failed."""
        with step.timer("generate"):
            try:
                data = await self._take(step.number)
            except RolloutsAbandonedError:
                raise
            except Exception:
                if self.global_step > 0:
                    await self._check_weights(self.global_step)  # divergence explains why rollouts fail
                    await self._save_before_failure()
                raise
        step.played, step.ends_epoch = data.played, data.ends_epoch
        step.record(data.metrics)
        return data.trajectories

    async def _take(self, number: int) -> StepData:
        """Return the rollouts of a step; RolloutsAbandonedError if they do not end in time after a stop request."""
        data, stop = asyncio.ensure_future(self._source.take(number)), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([data, stop], return_when=asyncio.FIRST_COMPLETED)
            if not data.done():
                await asyncio.wait([data], timeout=STOP_GRACE_S)
            if not data.done():
                raise RolloutsAbandonedError(
                    f"The rollouts of step {number} did not end within {STOP_GRACE_S:.0f} s after the stop request: "
                    "the step is abandoned"
                )
            return data.result()
        finally:
            for task in (data, stop):
                task.cancel()
            await asyncio.wait([data, stop])

    def build_batch(self, step: Step, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        """Pad the trajectories into tensors (B, L); mask groups of equal rewards if configured."""
        batch, metrics = self.learner.filter_groups(build_training_batch(trajectories, self._pad_token_id))
        step.record(metrics)
        return batch

    async def score(self, step: Step, batch: TrainingBatch) -> TrainingBatch:
        """Fill in values and log-probs (B, R) of the models before the update."""
        with step.timer("fwd_logprobs_values_reward"):
            return await self.learner.score(batch)

    def advantages(self, step: Step, batch: TrainingBatch) -> TrainingBatch:
        """Fill in `advantages` and `returns` (B, R)."""
        with step.timer("compute_advantages_and_returns"):
            batch, metrics = self.learner.advantages(batch)
        step.record(metrics)
        return batch

    async def update(self, step: Step, batch: TrainingBatch) -> None:
        """Update the critic if there is one, then the policy: one optimizer step per mini-batch and update epoch."""
        if self.learner.critic is not None:
            with step.timer("critic_train"):
                step.record(await self.learner.update_critic(batch))
        with step.timer("policy_train"):
            step.record(await self.learner.update_policy(batch))
        if step.number == self.total_steps or _has_no_gradient(step.metrics.numbers()):
            await self._check_weights(step.number)
        if self.cfg.trainer.update_ref_every_epoch and step.ends_epoch and step.number < self.total_steps:
            await self.learner.refresh_reference(step.number)
            logger.info("The policy of step %d is the new reference", step.number)

    async def sync_weights(self, step: Step) -> None:
        """Send the policy's weights, as version `step.number`, to the engines."""
        with step.timer("sync_weights"):
            await self._sync_engines(step.number)
            await self._source.on_weights(step.number)

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
        await self._check_weights(self.global_step)

        async def write(folder: Path) -> None:
            state = {
                "global_step": self.global_step,
                "config": to_yaml(self.cfg),
                "source": self._source.state_dict(),
                "learner": self.learner.state_dict(),
                "rng": random_state(),
            }
            await self.learner.save(folder)
            torch.save(state, folder / "driver.pt")

        path = await self._checkpoints.save(self.global_step, write, await self.learner.checkpoint_bytes())
        for callback in self._callbacks:
            await callback.on_checkpoint(self, path)

    async def _check_weights(self, step: int) -> None:
        """Check the weights after the update of `step`.

        Raises:
            DivergenceError: training has diverged; the message says what remains of the run.
        """
        try:
            await self.learner.check_weights()
        except DivergenceError as error:
            last = self._checkpoints.resumable_step()
            kept = "there is no earlier checkpoint" if last is None else f"the checkpoint of step {last} is kept"
            raise DivergenceError(
                f"in step {step}, {error}; {kept}. The same command would diverge again: start a new run with a lower "
                "learning rate, from the start or from a checkpoint (docs/guides/debugging.md#divergence)"
            ) from error

    async def _save_before_failure(self) -> None:
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
        self._checkpoints.check_space(await self.learner.checkpoint_bytes())

    async def export(self, folder: Path) -> None:
        """Write policy and critic as plain Hugging Face folders into `folder`, complete or not at all.

        Raises:
            CheckpointError: the disk refused.
            DivergenceError: the weights are NaN or infinite, or can no longer learn.
        """
        await self._check_weights(self.global_step)
        try:
            await write_complete(folder, self.learner.export)
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
            self.learner.load_state_dict(state["learner"])
        except (OSError, RuntimeError, EOFError, KeyError, UnpicklingError) as error:
            raise CheckpointError(
                f"cannot resume from {folder}: {error!r}; if another version wrote it, finish the run with that version"
            ) from error
        self._source.load_state_dict(state["source"])
        await self.learner.restore(folder)
        set_random_state(state["rng"])
        self.global_step = state["global_step"]
        logger.info("Resumed from %s", folder)
        for line in changed_settings(yaml.safe_load(state["config"]), self.cfg.model_dump(mode="json")):
            logger.warning("Changed since the checkpoint, whose optimizer and schedule continue as they were: %s", line)


def _has_no_gradient(metrics: Mapping[str, float]) -> bool:
    """Return True if updates of a step were skipped, or if its gradient is 0 although its advantages are not."""
    skipped = metrics.get("policy/skipped_updates", 0) + metrics.get("critic/skipped_updates", 0)
    return skipped > 0 or (metrics.get("policy/grad_norm") == 0 and metrics["loss/avg_raw_advantages_abs"] > 0)
