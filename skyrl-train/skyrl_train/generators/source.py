"""Sources of training data: the trajectories of each step."""

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyrl_train.algorithms.contract import estimator_traits
from skyrl_train.algorithms.dynamic_sampling import GroupCollector
from skyrl_train.algorithms.reward_pipeline import punish_overlong
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.order import PromptOrder
from skyrl_train.errors import EnvError
from skyrl_train.generators.base import BatchMetadata, RolloutGenerator, rollout_requests
from skyrl_train.generators.metrics import rollout_metrics, training_reward_metrics
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import DrawnPrompt, Metrics, PromptRow, Trajectory


@dataclass(frozen=True, slots=True)
class StepData:
    """The data of one step."""

    trajectories: list[Trajectory]  # to train on, with the samples of a draw next to each other
    played: list[Trajectory]  # all trajectories, including invalid ones and dropped groups
    metrics: Metrics
    ends_epoch: bool  # the step includes the last prompt of an epoch


class Rollouts(ABC):
    """Base class for sources of rollouts. Subclasses decide when to play them.

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

    @abstractmethod
    async def take(self, step: int) -> StepData:
        """Return a step's data. An error leaves the position unchanged."""

    async def before_sync(self) -> None:  # noqa: B027, engines may be idle between steps
        """Prepare for a weight sync."""

    async def after_sync(self, version: int) -> None:  # noqa: B027, as above
        """Record that the engines now sample with the weights of `version`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data after the last step."""
        return self._prompts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a position. DataError if it belongs to different data."""
        self._prompts.load_state_dict(state)

    async def close(self) -> None:  # noqa: B027, no rollout may outlive `take`
        """Cancel the rollouts in progress."""

    @abstractmethod
    async def _next_batch(self, step: int) -> tuple[list[DrawnPrompt[PromptRow]], list[Trajectory]]:
        """Return the next drawn prompts and all of their rollouts."""

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


class LockstepRollouts(Rollouts):
    """Synchronous rollouts: training and generation alternate."""

    async def take(self, step: int) -> StepData:
        """Draw prompts, play them, and return the step's data.

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

    async def _next_batch(self, step: int) -> tuple[list[DrawnPrompt[PromptRow]], list[Trajectory]]:
        prompts = self._prompts.next_batch()
        return prompts, await self._play(prompts, step)
