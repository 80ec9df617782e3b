"""Sources of training data: the trajectories of each step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from skyrl_train.algorithms.contract import estimator_traits
from skyrl_train.algorithms.dynamic_sampling import GroupCollector
from skyrl_train.algorithms.filters import punish_overlong
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.order import PromptOrder
from skyrl_train.errors import EnvError
from skyrl_train.generators.base import BatchMetadata, GeneratorInterface, RolloutRequest, play, rollout_requests
from skyrl_train.generators.metrics import rollout_metrics, training_reward_metrics
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import DrawnPrompt, Metrics, Trajectory


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

    async def on_weights(self, version: int) -> None:
        """Record that the engines now sample with the weights of `version`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data after the last step."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position; DataError if it belongs to other data."""
        ...


class LockstepRollouts:
    """Synchronous rollouts: training and generation alternate.

    Invalid trajectories are counted and dropped, and so is a valid one that is alone in its group if the advantage
    estimator compares samples. Dynamic sampling draws more prompts until enough groups are informative.
    """

    def __init__(
        self,
        cfg: SkyRLConfig,
        generator: GeneratorInterface,
        prompts: PromptOrder,
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

    async def on_weights(self, version: int) -> None:
        """Do nothing: engines are idle while weights change."""

    def state_dict(self) -> dict[str, Any]:
        return self._prompts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state)

    async def _sample(self, step: int) -> StepData:
        trainer, generator = self._cfg.trainer, self._cfg.generator
        metadata = BatchMetadata(step, "train", trainer.seed)
        collector = GroupCollector(
            trainer.algorithm.dynamic_sampling,
            trainer.algorithm.zero_variance_filter_tol,
            trainer.train_batch_size,
            random.Random(f"{trainer.seed}/{step}"),
        )
        drawn: list[DrawnPrompt] = []
        played: list[Trajectory] = []
        n_alone, n_epochs_over = 0, self._prompts.n_epochs_over
        while not collector.is_complete:
            batch = self._prompts.next_batch()
            drawn += batch
            requests = rollout_requests(batch, generator.n_samples_per_prompt, self._cfg.environment.env_class)
            trajectories = await play(self._generator, requests, self._sampling, metadata)
            usable, n_more = self._usable(trajectories, step)
            played, n_alone = played + trajectories, n_alone + n_more
            collector.add(usable, [prompt.draw for prompt in batch])
        rollouts = self._penalize_overlong(collector.take())
        metrics = rollout_metrics(played) | training_reward_metrics(played, generator.n_samples_per_prompt)
        metrics |= {"generate/n_left_alone": float(n_alone), **collector.metrics(), **self._prompts.metrics}
        if self._with_greedy_rewards:
            n_taken = len(rollouts)
            rollouts = await self._add_greedy_rewards(rollouts, drawn, metadata)
            metrics["generate/n_without_baseline"] = float(n_taken - len(rollouts))
        metrics |= self._generator.take_metrics()
        return StepData(rollouts, played, Metrics.of(metrics), self._prompts.n_epochs_over > n_epochs_over)

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
        self, rollouts: Sequence[Trajectory], drawn: Sequence[DrawnPrompt], metadata: BatchMetadata
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
        greedy = self._penalize_overlong(await play(self._generator, requests, greedy_sampling, metadata))
        rewards = {t.id.instance_id: t.total_reward for t in greedy if t.is_valid}
        with_baseline = [t for t in rollouts if t.id.instance_id in rewards]
        if not with_baseline:
            raise EnvError(f"all {len(greedy)} greedy rollouts failed; the first: {greedy[0].error}")
        return [replace(t, greedy_reward=rewards[t.id.instance_id]) for t in with_baseline]
