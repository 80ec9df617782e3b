"""Sources of training data: the trajectories of each step."""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from skyrl_train.algorithms.contract import estimator_traits
from skyrl_train.algorithms.dynamic_sampling import GroupCollector
from skyrl_train.algorithms.filters import punish_overlong
from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.order import PromptOrder
from skyrl_train.errors import EnvError
from skyrl_train.generators.base import BatchMetadata, GeneratorInterface, RolloutRequest, play, rollout_requests
from skyrl_train.generators.metrics import rollout_metrics, training_reward_metrics
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import DrawnPrompt, Metrics, PromptRow, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepData:
    """The data of one step."""

    trajectories: list[Trajectory]  # to train on; samples of a draw are adjacent
    played: list[Trajectory]  # all, including invalid ones and those of dropped groups
    metrics: Metrics
    ends_epoch: bool  # includes the last prompt of an epoch


class BatchSource(Protocol):
    """A provider of the data of each step."""

    async def take(self, step: int) -> StepData:
        """Return the data of a step. An error leaves the position unchanged."""
        ...

    async def before_weights(self) -> None:
        """Prepare for new weights of the engines."""
        ...

    async def on_weights(self, version: int) -> None:
        """Record that the engines now sample with the weights of `version`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data after the last step."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position; DataError if it belongs to other data."""
        ...

    async def close(self) -> None:
        """Abandon the rollouts that are still in progress."""
        ...


class Rollouts(ABC):
    """Rollouts of a generator. Subclasses decide when they are played.

    Invalid trajectories are counted and dropped, and so is a valid one that is alone in its group if the advantage
    estimator compares samples. Dynamic sampling draws more prompts until enough groups are informative.
    """

    def __init__(
        self,
        cfg: SkyRLConfig,
        generator: GeneratorInterface,
        prompts: PromptOrder[PromptRow],
        *,
        with_greedy_rewards: bool = False,
        penalizes_overlong: bool = True,
    ) -> None:
        """With `with_greedy_rewards`, also play each prompt greedily. Without `penalizes_overlong`, the trainer applies
        the soft overlong penalty itself.
        """
        self._cfg = cfg
        self._generator = generator
        self._prompts = prompts
        self._with_greedy_rewards = with_greedy_rewards
        self._penalizes_overlong = penalizes_overlong and cfg.trainer.algorithm.overlong_buffer_len is not None
        self._compares_samples = estimator_traits(cfg.trainer.algorithm).compares_samples
        self._sampling = SamplingParams.from_config(cfg.generator.sampling_params)

    @abstractmethod
    async def _next_batch(self, step: int) -> tuple[list[DrawnPrompt[PromptRow]], list[Trajectory]]:
        """Return the next drawn prompts, and the rollouts of each."""

    async def _play(self, prompts: Sequence[DrawnPrompt[PromptRow]], step: int) -> list[Trajectory]:
        n_samples = self._cfg.generator.n_samples_per_prompt
        requests = rollout_requests(prompts, n_samples, self._cfg.environment.env_class)
        return await play(self._generator, requests, self._sampling, self._metadata(step))

    def _metadata(self, step: int) -> BatchMetadata:
        return BatchMetadata(step, "train", self._cfg.trainer.seed)

    async def _sample(self, step: int) -> StepData:
        """Return the rollouts of as many batches as a step needs."""
        trainer, generator = self._cfg.trainer, self._cfg.generator
        collector = GroupCollector(
            trainer.algorithm.dynamic_sampling,
            trainer.algorithm.zero_variance_filter_tol,
            trainer.train_batch_size,
            random.Random(f"{trainer.seed}/{step}"),
        )
        drawn: list[DrawnPrompt[PromptRow]] = []
        played: list[Trajectory] = []
        n_alone = 0
        while not collector.is_complete:
            batch, trajectories = await self._next_batch(step)
            drawn += batch
            usable, n_more = self._usable(trajectories, step)
            played, n_alone = played + trajectories, n_alone + n_more
            collector.add(usable, [prompt.draw for prompt in batch])
        rollouts = self._penalize_overlong(collector.take())
        metrics = rollout_metrics(played) | training_reward_metrics(played, generator.n_samples_per_prompt)
        metrics |= {"generate/n_left_alone": float(n_alone), **collector.metrics(), **self._prompts.metrics}
        if self._with_greedy_rewards:
            n_taken = len(rollouts)
            rollouts = await self._add_greedy_rewards(rollouts, drawn, step)
            metrics["generate/n_without_baseline"] = float(n_taken - len(rollouts))
        metrics |= self._generator.take_metrics()
        return StepData(rollouts, played, Metrics.of(metrics), any(prompt.ends_epoch for prompt in drawn))

    def _usable(self, trajectories: Sequence[Trajectory], step: int) -> tuple[list[Trajectory], int]:
        """Return the valid trajectories to train on, and the number of valid ones that are alone in their group."""
        n_samples = self._cfg.generator.n_samples_per_prompt
        n_needed = 2 if self._compares_samples and n_samples > 1 else 1
        n_valid = Counter(t.id.draw for t in trajectories if t.is_valid)
        usable = [t for t in trajectories if t.is_valid and n_valid[t.id.draw] >= n_needed]
        if not usable:
            failures = [t.error for t in trajectories if not t.is_valid]
            raise EnvError(
                f"{len(failures)} of {len(trajectories)} rollouts of step {step} failed and none is left "
                f"to learn from; the first: {failures[0]}. Fix the environment and resume"
            )
        return usable, n_valid.total() - len(usable)

    def _penalize_overlong(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Apply the soft overlong penalty, if it is configured."""
        if not self._penalizes_overlong:
            return trajectories
        algorithm, sampling = self._cfg.trainer.algorithm, self._cfg.generator.sampling_params
        buffer, factor = algorithm.overlong_buffer_len, algorithm.overlong_buffer_penalty_factor
        assert buffer is not None
        return punish_overlong(trajectories, sampling.max_generate_length, buffer, factor)

    async def _add_greedy_rewards(
        self, rollouts: Sequence[Trajectory], drawn: Sequence[DrawnPrompt[PromptRow]], step: int
    ) -> list[Trajectory]:
        """Play each row greedily once, and add its reward to the row's rollouts; drop them if it failed."""
        n_samples = self._cfg.generator.n_samples_per_prompt
        prompts = {prompt.row.uid: prompt for prompt in reversed(drawn)}
        requests = [
            RolloutRequest(replace(request.id, repetition_id=n_samples), request.row)
            for request in rollout_requests(
                [prompts[uid] for uid in dict.fromkeys(t.id.instance_id for t in rollouts)],
                1,
                self._cfg.environment.env_class,
            )
        ]
        greedy_sampling = replace(self._sampling, temperature=0.0)
        greedy = await play(self._generator, requests, greedy_sampling, self._metadata(step))
        greedy = self._penalize_overlong(greedy)
        rewards = {t.id.instance_id: t.total_reward for t in greedy if t.is_valid}
        with_baseline = [t for t in rollouts if t.id.instance_id in rewards]
        if not with_baseline:
            raise EnvError(f"all {len(greedy)} greedy rollouts failed; the first: {greedy[0].error}")
        return [replace(t, greedy_reward=rewards[t.id.instance_id]) for t in with_baseline]


class LockstepRollouts(Rollouts):
    """Synchronous rollouts: training and generation alternate."""

    async def take(self, step: int) -> StepData:
        """Draw prompts, play them, and return the data of a step.

        Raises:
            EnvError: a batch has no trajectory to train on.
            DataError: dynamic sampling did not find enough groups.
        """
        position = self._prompts.state_dict()
        try:
            return await self._sample(step)
        except BaseException:
            self._prompts.load_state_dict(position)
            raise

    async def before_weights(self) -> None:
        """Do nothing: engines are idle between steps."""

    async def on_weights(self, version: int) -> None:
        """Do nothing: the next step starts its own rollouts."""

    def state_dict(self) -> dict[str, Any]:
        return self._prompts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state)

    async def close(self) -> None:
        """Do nothing: no rollout outlives `take`."""

    async def _next_batch(self, step: int) -> tuple[list[DrawnPrompt[PromptRow]], list[Trajectory]]:
        prompts = self._prompts.next_batch()
        return prompts, await self._play(prompts, step)


class _Batch(NamedTuple):
    prompts: list[DrawnPrompt[PromptRow]]
    playing: asyncio.Task[list[Trajectory]]


class BufferedRollouts(Rollouts):
    """Asynchronous rollouts: while the trainer updates the policy, the engines play the batches of the next steps.

    With S = `trainer.fully_async.max_staleness_steps`, S + 1 batches are in progress or complete after each sync. Steps
    take them in the order in which their prompts were drawn, so that short rollouts are not preferred. A step updates
    weights that are therefore at most S versions newer than those with which its rollouts began; those in progress
    continue with new weights.

    Rollouts of prompts that no step has trained on are lost when the run stops. A resumed run plays them again.
    """

    def __init__(
        self,
        cfg: SkyRLConfig,
        generator: GeneratorInterface,
        prompts: PromptOrder[PromptRow],
        *,
        total_steps: int,
        with_greedy_rewards: bool = False,
        penalizes_overlong: bool = True,
    ) -> None:
        """Play no more batches than `total_steps` need. The other arguments are those of `Rollouts`."""
        super().__init__(
            cfg,
            generator,
            prompts,
            with_greedy_rewards=with_greedy_rewards,
            penalizes_overlong=penalizes_overlong,
        )
        self._settings = cfg.trainer.fully_async
        self._total_steps = total_steps
        self._version = 0  # of the engines' weights
        self._batches: deque[_Batch] = deque()  # drawn and not trained on yet, in order
        self._n_taken = 0  # batches of the step in progress
        self._slots = asyncio.Semaphore(self._settings.num_parallel_generation_workers)
        self._may_start = asyncio.Event()
        self._running: set[asyncio.Task[Any]] = set()  # groups that have started

    async def take(self, step: int) -> StepData:
        """Wait for the oldest rollouts, and return the data of a step.

        Adds the metrics of staleness, which is the number of updates between the weights that sampled the first token
        of a trajectory and those that the step updates:

            async/staleness_mean, _min, _max     over the trajectories of the step
            async/staleness_ratio                fraction of trajectories with a staleness above 0
            async/staleness_violation_count      trajectories above `max_staleness_steps`, which is always 0
            async/gen_buffer_qsize_at_wait_start batches that were complete when the step began

        Raises:
            EnvError: a batch has no trajectory to train on.
            DataError: dynamic sampling did not find enough groups.
            Exception: any error of the generator, of this or of a later batch.
        """
        n_complete = sum(batch.playing.done() for batch in self._batches)
        self._n_taken = 0
        data = await self._sample(step)
        for _ in range(self._n_taken):
            self._batches.popleft()
        self._n_taken = 0
        metrics = {"async/gen_buffer_qsize_at_wait_start": float(n_complete)}
        staleness = [step - 1 - t.weight_versions[0] for t in data.trajectories if t.weight_versions]
        if staleness:
            n_violations = sum(n > self._settings.max_staleness_steps for n in staleness)
            metrics |= {
                "async/staleness_mean": sum(staleness) / len(staleness),
                "async/staleness_min": min(staleness),
                "async/staleness_max": max(staleness),
                "async/staleness_ratio": sum(n > 0 for n in staleness) / len(staleness),
                "async/staleness_violation_count": n_violations,
            }
        return replace(data, metrics=data.metrics.merge(Metrics.of(metrics)))

    async def before_weights(self) -> None:
        """Without `in_flight_weight_updates`, wait for the rollouts that have started; others wait."""
        if not self._settings.in_flight_weight_updates:
            self._may_start.clear()
            while self._running:
                await asyncio.wait(self._running)

    async def on_weights(self, version: int) -> None:
        """Start the rollouts for which the sync has made room."""
        self._version = version
        self._may_start.set()
        try:
            self._start_batches(min(self._settings.max_staleness_steps + 1, self._total_steps - version))
        except Exception as error:  # noqa: BLE001, `take` draws again and raises it, after which the run saves its weights
            logger.warning("The next prompts cannot be drawn: %s", error)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step: that of the prompts, and those that no step has trained on."""
        return self._prompts.state_dict(unused=[prompt for batch in self._batches for prompt in batch.prompts])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not self._batches, "load the position before the first rollouts"
        self._prompts.load_state_dict(state)

    async def close(self) -> None:
        """Abandon the rollouts that are still in progress."""
        for batch in self._batches:
            batch.playing.cancel()
        await asyncio.gather(*(batch.playing for batch in self._batches), return_exceptions=True)

    def _start_batches(self, n_batches: int) -> None:
        """Draw and start batches until the step in progress, or the next one, has `n_batches` ahead."""
        while len(self._batches) - self._n_taken < n_batches:
            position = self._prompts.state_dict()
            try:
                prompts = self._prompts.next_batch()
            except BaseException:
                self._prompts.load_state_dict(position)
                raise
            self._batches.append(_Batch(prompts, asyncio.create_task(self._play_groups(prompts))))

    async def _play_groups(self, prompts: Sequence[DrawnPrompt[PromptRow]]) -> list[Trajectory]:
        """Play each prompt as soon as there is a slot for it, and return the rollouts of all."""

        async def play_group(prompt: DrawnPrompt[PromptRow]) -> list[Trajectory]:
            task = asyncio.current_task()
            assert task is not None
            async with self._slots:
                await self._may_start.wait()
                self._running.add(task)
                try:
                    return await self._play([prompt], self._version + 1)
                finally:
                    self._running.discard(task)

        groups = await gather_or_cancel(map(play_group, prompts))
        return [trajectory for group in groups for trajectory in group]

    async def _next_batch(self, step: int) -> tuple[list[DrawnPrompt[PromptRow]], list[Trajectory]]:
        """Wait for the oldest batch. The next one may start, if dynamic sampling dropped the one before it."""
        n_ahead = min(self._settings.max_staleness_steps + 1, self._total_steps - step + 1)
        self._start_batches(n_ahead)
        prompts, playing = self._batches[self._n_taken]
        while not playing.done():
            unfinished = {batch.playing for batch in self._batches if not batch.playing.done()}
            await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)
            for batch in self._batches:
                if batch.playing.done():
                    batch.playing.result()  # raises the error of a later batch at once
        self._n_taken += 1
        return prompts, playing.result()
