"""The training step on one page: prompts → rollouts → advantages → update → sync.

A step plays P prompts G times each. Its batch has B rows of L tokens, and the last R of them are the response.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from inspect import iscoroutinefunction
from typing import Any, TypeVar

from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.errors import EngineError
from skyrl_train.generators.source import Rollouts
from skyrl_train.learner import Learner
from skyrl_train.run import Callback, Run, Step
from skyrl_train.types import Metrics, TrainingBatch, Trajectory
from skyrl_train.watchdog import ROLLOUTS, SYNC, Wait

__all__ = ["RolloutsAbandonedError", "Step", "Trainer"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_GRACE_S = 20.0
"""Seconds that a step's rollouts may still take after a stop request. Then the step is abandoned."""


STAGES = {"rollout", "build_batch", "score", "advantages", "update", "sync_weights", "finish_step"}
"""Methods of a training step that a subclass may override."""


class RolloutsAbandonedError(Exception):
    """The rollouts of a step did not end in time after a stop request."""


class Trainer(Run):
    """A trainer that plays rollouts with the policy and trains it on their rewards."""

    def __init_subclass__(cls) -> None:
        """Raise TypeError if an overridden stage is async and the original is not, or vice versa."""
        super().__init_subclass__()
        for name in STAGES & cls.__dict__.keys():
            is_async = iscoroutinefunction(getattr(Trainer, name))
            if iscoroutinefunction(cls.__dict__[name]) != is_async:
                kind = "async def" if is_async else "def, without async"
                raise TypeError(f"{cls.__name__}.{name} must be defined with {kind}, as Trainer.{name} is")

    def __init__(
        self,
        cfg: SkyRLConfig,
        *,
        source: Rollouts,
        learner: Learner,
        sync_engines: Callable[[int], Awaitable[Metrics]],
        total_steps: int,
        pad_token_id: int,
        callbacks: Sequence[Callback],
    ) -> None:
        """Create the trainer. It calls `sync_engines(version)` before the first step and after each update."""
        super().__init__(cfg, models=learner, position=source, total_steps=total_steps, callbacks=callbacks)
        self.cfg: SkyRLConfig = cfg
        self.learner = learner
        self._source = source
        self._sync_engines = sync_engines
        self._pad_token_id = pad_token_id

    async def train(self) -> None:
        """Train from the last checkpoint, or from the start, to the last step."""
        async with self.ending():
            try:
                await self.start()
                for step in self.steps():
                    with step.timer("step"):
                        rollouts = await self.rollout(step)  # trajectories of P draws
                        batch = self.build_batch(step, rollouts)  # sequences (B, L)
                        batch = await self.score(step, batch)  # values, old and reference log-probs (B, R)
                        batch = self.advantages(step, batch)  # (B, R)
                        step.trained, step.batch = rollouts, batch
                        await self.update(step, batch)  # epochs × mini-batches of the value and the policy loss
                        await self.sync_weights(step)  # the engines hold version step.number
                    await self.finish_step(step)  # callbacks: evaluate, log, checkpoint
            except RolloutsAbandonedError as stopped:
                logger.warning("%s", stopped)
            finally:
                await self._source.close()

    # -- the stages of a step

    async def prepare(self, step: Step) -> None:
        await self.sync_weights(step)

    async def rollout(self, step: Step) -> list[Trajectory]:
        """Play P prompts G times each. Return the trajectories that are valid."""
        with step.timer("generate"):
            try:
                data = await self._wait_for_rollouts(self._source.take(step.number), step.number)
            except RolloutsAbandonedError:
                raise
            except Exception:
                if self.global_step > 0:
                    await self.check_weights(self.global_step)  # divergence explains why rollouts fail
                    await self.save_before_failure()
                raise
        step.played, step.ends_epoch = data.played, data.ends_epoch
        step.record(data.metrics)
        return data.trajectories

    async def _wait_for_rollouts(self, rollouts: Coroutine[Any, Any, T], number: int) -> T:
        """Wait for rollouts. Raise RolloutsAbandonedError if they outlast the grace period after a stop request."""
        waiting, stop = asyncio.ensure_future(rollouts), asyncio.ensure_future(self._stop.wait())
        try:
            with Wait(ROLLOUTS, f"step {number}"):
                await asyncio.wait([waiting, stop], return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    await asyncio.wait([waiting], timeout=STOP_GRACE_S)
            if not waiting.done():
                raise RolloutsAbandonedError(
                    f"The rollouts of step {number} did not end within {STOP_GRACE_S:.0f} s after the stop request, "
                    "so the step is abandoned"
                )
            return waiting.result()
        finally:
            for task in (waiting, stop):
                task.cancel()
            await asyncio.wait([waiting, stop])

    def build_batch(self, step: Step, trajectories: Sequence[Trajectory]) -> TrainingBatch:
        """Pad the trajectories into tensors (B, L). With `zero_variance_filter`, mask groups of equal rewards."""
        batch, metrics = self.learner.filter_groups(build_training_batch(trajectories, self._pad_token_id))
        step.record(metrics)
        return batch

    async def score(self, step: Step, batch: TrainingBatch) -> TrainingBatch:
        """Fill in the critic's values and the policy's and reference's log-probs (B, R) before the update."""
        with step.timer("fwd_logprobs_values_reward"):
            return await self.learner.score(batch)

    def advantages(self, step: Step, batch: TrainingBatch) -> TrainingBatch:
        """Fill in `advantages` and `returns` (B, R)."""
        with step.timer("compute_advantages_and_returns"):
            batch, metrics = self.learner.advantages(batch)
        step.record(metrics)
        return batch

    async def update(self, step: Step, batch: TrainingBatch) -> None:
        """Update the critic, if any, and then the policy: one optimizer step per mini-batch and update epoch."""
        await self.make_room()
        if self.learner.critic is not None:
            with step.timer("critic_train"):
                step.record(await self.learner.update_critic(batch))
        with step.timer("policy_train"):
            step.record(await self.learner.update_policy(batch))
        metrics = step.metrics.numbers()
        n_skipped = metrics.get("policy/skipped_updates", 0) + metrics.get("critic/skipped_updates", 0)
        # a gradient of 0 is suspect if the advantages are not 0
        has_no_gradient = metrics.get("policy/grad_norm") == 0 and metrics["loss/avg_raw_advantages_abs"] > 0
        if step.number == self.total_steps or n_skipped > 0 or has_no_gradient:
            await self.check_weights(step.number)
        if self.cfg.trainer.update_ref_every_epoch and step.ends_epoch and step.number < self.total_steps:
            await self.learner.refresh_reference(step.number)
            logger.info("The policy of step %d is the new reference", step.number)

    async def sync_weights(self, step: Step) -> None:
        """Send the policy's weights to the engines as version `step.number`."""
        with step.timer("sync_weights"):
            with suppress(RolloutsAbandonedError):  # after a stop request, no step will train on them
                await self._wait_for_rollouts(self._source.before_sync(), step.number + 1)
            try:
                with Wait(SYNC, f"step {step.number}"):
                    step.record(await self._sync_engines(step.number))
            except EngineError:
                await self.check_weights(step.number)  # divergence explains why engines reject the weights
                raise
            await self._source.after_sync(step.number)
