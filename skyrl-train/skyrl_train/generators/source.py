"""Sources of training data: the trajectories of each step."""

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from skyrl_train.algorithms.contract import estimator_traits
from skyrl_train.algorithms.filters import GroupCollector
from skyrl_train.algorithms.reward_pipeline import punish_overlong
from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.order import PromptOrder
from skyrl_train.errors import EnvError
from skyrl_train.generators.base import BatchMetadata, RolloutGenerator, rollout_requests
from skyrl_train.generators.metrics import rollout_metrics, training_reward_metrics
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import DrawnPrompt, Metrics, PromptRow, Trajectory
from skyrl_train.watchdog import DATA, SLOT, Wait

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepData:
    """The data of one step."""

    trajectories: list[Trajectory]  # to train on, with the samples of a draw next to each other
    played: list[Trajectory]  # all trajectories, including invalid ones and dropped groups
    metrics: Metrics
    ends_epoch: bool  # the step includes the last prompt of an epoch


class Rollouts:
    """Synchronous rollouts: training and generation alternate. Subclasses may play rollouts at other times.

    Invalid trajectories are counted and dropped. If the advantage estimator compares samples, a valid trajectory that
    is alone in its group is also dropped. Dynamic sampling draws more prompts until enough groups are informative.
    """

    def __init__(
        self,
        cfg: SkyRLConfig,
        generator: RolloutGenerator,
        prompts: PromptOrder[PromptRow],
        *,
        with_greedy_rewards: bool = False,
    ) -> None:
        """With `with_greedy_rewards`, also play each prompt greedily."""
        self._cfg = cfg
        self._generator = generator
        self._prompts = prompts
        self._with_greedy_rewards = with_greedy_rewards
        self._compares_samples = estimator_traits(cfg.trainer.algorithm).compares_samples
        self._sampling = SamplingParams.from_config(cfg.generator.sampling_params)

    async def take(self, step: int) -> StepData:
        """Return a step's data. An error leaves the position unchanged.

        Raise EnvError if a batch has no trajectory to train on, and DataError if dynamic sampling finds too few groups.
        """
        position = self._prompts.state_dict()
        try:
            return await self._sample(step)
        except BaseException:
            self._prompts.load_state_dict(position)
            raise

    async def before_sync(self) -> None:
        """Prepare for a weight sync."""

    async def after_sync(self, version: int) -> None:
        """Record that the engines now sample with the weights of `version`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data after the last step."""
        return self._prompts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a position. DataError if it belongs to different data."""
        self._prompts.load_state_dict(state)

    async def close(self) -> None:
        """Cancel the rollouts in progress."""

    async def _next_batch(self, step: int) -> tuple[list[DrawnPrompt[PromptRow]], list[Trajectory]]:
        """Return the next drawn prompts and all of their rollouts."""
        prompts = self._draw(step)
        return prompts, await self._play(prompts, step)

    def _draw(self, step: int) -> list[DrawnPrompt[PromptRow]]:
        """Draw the next prompts."""
        with Wait(DATA, f"step {step}"):
            return self._prompts.next_batch()

    async def _play(
        self, prompts: Sequence[DrawnPrompt[PromptRow]], step: int, *, greedy: bool = False
    ) -> list[Trajectory]:
        """Play all samples of each prompt, or its greedy rollout."""
        n_samples, sampling = self._cfg.generator.n_samples_per_prompt, self._sampling
        requests = rollout_requests(prompts, 1 if greedy else n_samples, self._cfg.environment.env_class)
        if greedy:
            sampling = replace(sampling, temperature=0.0)
            requests = [replace(request, id=replace(request.id, repetition_id=n_samples)) for request in requests]
        return await self._generator.play(requests, sampling, BatchMetadata(step, "train", self._cfg.trainer.seed))

    async def _sample(self, step: int) -> StepData:
        """Collect batches of rollouts until the step has enough."""
        trainer, generator = self._cfg.trainer, self._cfg.generator
        collector = GroupCollector(
            trainer.algorithm.dynamic_sampling,
            trainer.algorithm.zero_variance_filter_tol,
            trainer.train_batch_size,
            random.Random(f"{trainer.seed}/{step}"),
        )
        drawn: list[DrawnPrompt[PromptRow]] = []
        played: list[Trajectory] = []
        n_alone = 0  # valid trajectories that were dropped because nothing is left to compare them with
        n_needed = 2 if self._compares_samples and generator.n_samples_per_prompt > 1 else 1  # in each group
        while not collector.is_complete:
            batch, trajectories = await self._next_batch(step)
            drawn += batch
            n_valid = Counter(t.id.draw for t in trajectories if t.is_valid)
            usable = [t for t in trajectories if t.is_valid and n_valid[t.id.draw] >= n_needed]
            if not usable:
                failures = [t.error for t in trajectories if not t.is_valid]
                raise EnvError(
                    f"{len(failures)} of {len(trajectories)} rollouts at step {step} failed, and none is left "
                    f"to train on. The first error: {failures[0]}. Fix the environment and resume"
                )
            played, n_alone = played + trajectories, n_alone + n_valid.total() - len(usable)
            collector.add(usable, [prompt.draw for prompt in batch])
        rollouts = self._penalize_overlong(collector.take())
        metrics = rollout_metrics(played)
        metrics |= training_reward_metrics(played, generator.n_samples_per_prompt, generator.success_reward)
        if seconds := [sum(t.timing.values()) for t in played if t.timing]:
            metrics |= {"generate/avg_seconds": sum(seconds) / len(seconds), "generate/max_seconds": max(seconds)}
        metrics |= {"generate/n_left_alone": float(n_alone), **collector.metrics(), **self._prompts.metrics}
        if self._with_greedy_rewards:
            n_taken = len(rollouts)
            rollouts = await self._add_greedy_rewards(rollouts, drawn, step)
            metrics["generate/n_without_baseline"] = float(n_taken - len(rollouts))
        metrics |= self._generator.take_metrics()
        return StepData(rollouts, played, Metrics.of(metrics), any(prompt.ends_epoch for prompt in drawn))

    def _penalize_overlong(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Apply the soft overlong penalty, if it is configured."""
        algorithm, sampling = self._cfg.trainer.algorithm, self._cfg.generator.sampling_params
        buffer, factor = algorithm.overlong_buffer_len, algorithm.overlong_buffer_penalty_factor
        if buffer is None:
            return trajectories
        return punish_overlong(trajectories, sampling.max_generate_length, buffer, factor)

    async def _add_greedy_rewards(
        self, rollouts: Sequence[Trajectory], drawn: Sequence[DrawnPrompt[PromptRow]], step: int
    ) -> list[Trajectory]:
        """Add the reward of each prompt's greedy rollout to the prompt's rollouts. If it failed, drop them."""
        prompts = {prompt.row.uid: prompt for prompt in reversed(drawn)}
        uids = dict.fromkeys(t.id.instance_id for t in rollouts)
        greedy = await self._greedy_rollouts([prompts[uid] for uid in uids], step)
        rewards = {t.id.instance_id: t.total_reward for t in self._penalize_overlong(greedy) if t.is_valid}
        with_baseline = [t for t in rollouts if t.id.instance_id in rewards]
        if not with_baseline:
            raise EnvError(f"all {len(greedy)} greedy rollouts failed. The first error: {greedy[0].error}")
        return [replace(t, greedy_reward=rewards[t.id.instance_id]) for t in with_baseline]

    async def _greedy_rollouts(self, prompts: Sequence[DrawnPrompt[PromptRow]], step: int) -> list[Trajectory]:
        """Return one greedy rollout per prompt."""
        return await self._play(prompts, step, greedy=True)


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

        Raises as `Rollouts.take` does, or an error of the generator on this batch or a later one.
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
            prompts = self._draw(step)
            self._batches.append(_Batch(prompts, asyncio.create_task(self._play_batch(prompts))))

    async def _play_batch(self, prompts: Sequence[DrawnPrompt[PromptRow]]) -> list[Trajectory]:
        """Play the rollouts of each prompt as soon as a slot is free."""

        async def play_prompt(prompt: DrawnPrompt[PromptRow]) -> list[Trajectory]:
            task = asyncio.current_task()
            assert task is not None
            async with self._slots:
                with Wait(SLOT, f"prompt {prompt.row.uid}", "the next weight sync"):
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
