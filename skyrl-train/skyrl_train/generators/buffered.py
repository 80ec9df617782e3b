"""Rollouts of asynchronous training. They are played ahead of the steps that train on them."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.order import PromptOrder
from skyrl_train.generators.base import RolloutGenerator
from skyrl_train.generators.source import Rollouts, StepData
from skyrl_train.types import DrawnPrompt, Metrics, PromptRow, Trajectory

logger = logging.getLogger(__name__)


class _Batch(NamedTuple):
    prompts: list[DrawnPrompt[PromptRow]]
    rollouts: asyncio.Task[list[Trajectory]]


class BufferedRollouts(Rollouts):
    """Asynchronous rollouts: the engines play the batches of the next steps while the policy is updated.

    With S = `trainer.fully_async.max_staleness_steps`, S + 1 batches are in progress or complete after each sync. Steps
    take them in draw order: taking whatever is complete would favor short rollouts. So a step trains weights at most S
    versions newer than the weights its rollouts started with. With S = 1, batch 2 starts before step 1 has updated the
    weights, and step 2 trains on it.

    A run that stops discards rollouts that no step has trained on, so a resumed run plays their prompts again.
    """

    def __init__(
        self,
        cfg: SkyRLConfig,
        generator: RolloutGenerator,
        prompts: PromptOrder[PromptRow],
        *,
        total_steps: int,
        with_greedy_rewards: bool = False,
    ) -> None:
        """Play batches for at most `total_steps` steps. For the other arguments, see `Rollouts`."""
        super().__init__(cfg, generator, prompts, with_greedy_rewards=with_greedy_rewards)
        self._settings = cfg.trainer.fully_async
        self._total_steps = total_steps
        self._version = 0  # of the engines' weights
        self._batches: deque[_Batch] = deque()  # drawn but not trained on yet, in draw order
        self._n_taken = 0  # number of batches that the current step uses
        self._greedy: dict[int, Trajectory] = {}  # by draw
        self._slots = asyncio.Semaphore(self._settings.num_parallel_generation_workers)
        self._can_start = asyncio.Event()
        self._running: set[asyncio.Task[Any]] = set()  # prompts whose rollouts are in progress

    async def take(self, step: int) -> StepData:
        """Wait for the oldest rollouts and return the step's data, with `async/*` metrics of its staleness.

        Raises:
            EnvError: a batch has no trajectory to train on.
            DataError: dynamic sampling did not find enough groups.
            Exception: the generator failed on this batch or a later one.
        """
        n_complete = sum(batch.rollouts.done() for batch in self._batches)
        self._n_taken = 0
        data = await self._sample(step)
        for _ in range(self._n_taken):
            for prompt in self._batches.popleft().prompts:
                self._greedy.pop(prompt.draw, None)
        self._n_taken = 0
        metrics = {"async/gen_buffer_qsize_at_wait_start": float(n_complete)}
        staleness = [step - 1 - t.weight_versions[0] for t in data.trajectories if t.weight_versions]
        if staleness:
            metrics |= {
                "async/staleness_mean": sum(staleness) / len(staleness),
                "async/staleness_min": min(staleness),
                "async/staleness_max": max(staleness),
                "async/staleness_ratio": sum(n > 0 for n in staleness) / len(staleness),
                "async/staleness_violation_count": sum(n > self._settings.max_staleness_steps for n in staleness),
            }
        return replace(data, metrics=data.metrics.merge(Metrics.of(metrics)))

    async def before_sync(self) -> None:
        """Unless weights may change in flight, wait for rollouts in progress and do not start new ones."""
        if not self._settings.in_flight_weight_updates:
            self._can_start.clear()
            while self._running:
                await asyncio.wait(self._running)

    async def after_sync(self, version: int) -> None:
        """Record the new version, let waiting rollouts start, and start the next batch."""
        self._version = version
        self._can_start.set()
        try:
            self._start_batches(version + 1)
        except Exception as error:  # noqa: BLE001, `take` draws again and raises it, and the run saves its weights
            logger.warning("Could not draw the next prompts; the next step retries: %s", error)

    def state_dict(self) -> dict[str, Any]:
        """Return the prompts' position after the last step, including drawn prompts that no step has trained on."""
        return self._prompts.state_dict(unused=[prompt for batch in self._batches for prompt in batch.prompts])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not self._batches, "load the position before the first rollouts"
        super().load_state_dict(state)

    async def close(self) -> None:
        for batch in self._batches:
            batch.rollouts.cancel()
        await asyncio.gather(*(batch.rollouts for batch in self._batches), return_exceptions=True)

    def _start_batches(self, step: int) -> None:
        """Start batches until `step` and the following steps have everything that may be played ahead."""
        n_batches = min(self._settings.max_staleness_steps, self._total_steps - step) + 1
        while len(self._batches) - self._n_taken < n_batches:
            prompts = self._prompts.next_batch()
            self._batches.append(_Batch(prompts, asyncio.create_task(self._play_batch(prompts))))

    async def _play_batch(self, prompts: Sequence[DrawnPrompt[PromptRow]]) -> list[Trajectory]:
        """Play the rollouts of each prompt as soon as a slot is free."""

        async def play_prompt(prompt: DrawnPrompt[PromptRow]) -> list[Trajectory]:
            task = asyncio.current_task()
            assert task is not None
            async with self._slots:
                await self._can_start.wait()
                self._running.add(task)
                try:
                    step = self._version + 1  # the step that weights of this version play for
                    calls = [self._play([prompt], step)]
                    if self._with_greedy_rewards:
                        calls.append(self._play([prompt], step, greedy=True))
                    sampled, *greedy = await gather_or_cancel(calls)
                    for (trajectory,) in greedy:
                        self._greedy[prompt.draw] = trajectory
                    return sampled
                finally:
                    self._running.discard(task)

        groups = await gather_or_cancel(map(play_prompt, prompts))
        return [trajectory for group in groups for trajectory in group]

    async def _next_batch(self, step: int) -> tuple[list[DrawnPrompt[PromptRow]], list[Trajectory]]:
        """Wait for the oldest unused batch. If dynamic sampling needs more groups, start another batch."""
        self._start_batches(step)
        prompts, rollouts = self._batches[self._n_taken]
        while True:
            for batch in self._batches:
                if batch.rollouts.done():
                    batch.rollouts.result()  # raise the error of a later batch right away
            if rollouts.done():
                break
            unfinished = [batch.rollouts for batch in self._batches if not batch.rollouts.done()]
            await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)
        self._n_taken += 1
        return prompts, rollouts.result()

    async def _greedy_rollouts(self, prompts: Sequence[DrawnPrompt[PromptRow]], step: int) -> list[Trajectory]:
        """Return the greedy rollouts that were played together with the sampled rollouts."""
        return [self._greedy[prompt.draw] for prompt in prompts]
