"""Sources of training data: where the trajectories of a step come from."""

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

    trajectories: list[Trajectory]  # to learn from, the samples of a draw side by side
    played: list[Trajectory]  # everything, the invalid ones and those of dropped groups too
    metrics: Metrics
    ends_epoch: bool  # the last prompt of an epoch was drawn for it


class BatchSource(Protocol):
    """Provides the data of one step after another."""

    async def take(self, step: int) -> StepData:
        """Return the data of a step. If it raises, the position is that of before the call."""
        ...

    async def on_weights(self, version: int) -> None:
        """Note that the engines sample with the weights of `version` from now on."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data after the step that was taken last."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position; DataError if it is one in other data."""
        ...


class LockstepRollouts:
    """Plays the rollouts of a step when the step begins: training and generation take turns.

    Invalid trajectories are counted and left out, and so is one whose whole group failed: it has nothing to be
    compared with. Dynamic sampling draws more prompts until enough groups teach something.
    """

    def __init__(
        self,
        cfg: SkyRLConfig,
        generator: GeneratorInterface,
        prompts: PromptOrder,
        *,
        with_greedy_rewards: bool = False,
    ) -> None:
        """`with_greedy_rewards` plays every prompt greedily, too."""
        self._cfg = cfg
        self._generator = generator
        self._prompts = prompts
        self._with_greedy_rewards = with_greedy_rewards
        self._compares_samples = estimator_traits(cfg.trainer.algorithm).compares_samples
        self._sampling = SamplingParams.from_config(cfg.generator.sampling_params)

    async def take(self, step: int) -> StepData:
        """See `BatchSource.take`.

        Raises:
            EnvError: a batch left nothing to learn from.
            DataError: dynamic sampling did not find enough groups.
        """
        position, n_epochs_over = self._prompts.state_dict(), self._prompts.n_epochs_over
        try:
            trajectories, played, metrics = await self._sample(step)
        except BaseException:
            self._prompts.load_state_dict(position)
            raise
        n_samples = self._cfg.generator.n_samples_per_prompt
        measured = rollout_metrics(played) | training_reward_metrics(played, n_samples) | metrics
        ends_epoch = self._prompts.n_epochs_over > n_epochs_over
        return StepData(trajectories, played, Metrics.of(measured), ends_epoch)

    async def on_weights(self, version: int) -> None:
        """See `BatchSource.on_weights`."""

    def state_dict(self) -> dict[str, Any]:
        """See `BatchSource.state_dict`."""
        return self._prompts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `BatchSource.load_state_dict`."""
        self._prompts.load_state_dict(state)

    async def _sample(self, step: int) -> tuple[list[Trajectory], list[Trajectory], dict[str, float]]:
        """Return the trajectories to learn from, all that were played, and metrics of how the step came about."""
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
        n_alone = 0
        while not collector.is_complete:
            batch = self._prompts.next_batch()
            drawn += batch
            requests = rollout_requests(batch, generator.n_samples_per_prompt, self._cfg.environment.env_class)
            trajectories = await play(self._generator, requests, self._sampling, metadata)
            usable, n_more = self._usable(trajectories, step)
            played, n_alone = played + trajectories, n_alone + n_more
            collector.add(usable, [prompt.draw for prompt in batch])
        rollouts = self._punished(collector.take())
        metrics = {"generate/n_left_alone": float(n_alone), **collector.metrics()}
        if self._with_greedy_rewards:
            n_taken = len(rollouts)
            rollouts = await self._add_greedy_rewards(rollouts, drawn, metadata)
            metrics["generate/n_without_baseline"] = float(n_taken - len(rollouts))
        return rollouts, played, self._generator.take_metrics() | metrics

    def _usable(self, trajectories: Sequence[Trajectory], step: int) -> tuple[list[Trajectory], int]:
        """Return the valid trajectories that have something to be compared with, and how many valid ones have not."""
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

    def _punished(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Apply the soft overlong punishment, if there is one."""
        algorithm, sampling = self._cfg.trainer.algorithm, self._cfg.generator.sampling_params
        if algorithm.overlong_buffer_len is None:
            return trajectories
        buffer, factor = algorithm.overlong_buffer_len, algorithm.overlong_buffer_penalty_factor
        return punish_overlong(trajectories, sampling.max_generate_length, buffer, factor)

    async def _add_greedy_rewards(
        self, rollouts: Sequence[Trajectory], drawn: Sequence[DrawnPrompt], metadata: BatchMetadata
    ) -> list[Trajectory]:
        """Return the rollouts with the reward of a greedy one of their row; those of a row where it failed are dropped.

        Every row is played greedily once, however often it was drawn or copied.
        """
        n_samples = self._cfg.generator.n_samples_per_prompt
        used = {t.id.instance_id for t in rollouts}
        prompts = {prompt.row.uid: prompt for prompt in reversed(drawn) if prompt.row.uid in used}
        requests = [
            RolloutRequest(replace(request.id, repetition_id=n_samples), request.row)
            for request in rollout_requests(
                [prompts[t] for t in dict.fromkeys(t.id.instance_id for t in rollouts)],
                1,
                self._cfg.environment.env_class,
            )
        ]
        greedy_sampling = replace(self._sampling, temperature=0.0)
        greedy = self._punished(await play(self._generator, requests, greedy_sampling, metadata))
        rewards = {t.id.instance_id: t.total_reward for t in greedy if t.is_valid}
        with_baseline = [t for t in rollouts if t.id.instance_id in rewards]
        if not with_baseline:
            raise EnvError(f"all {len(greedy)} greedy rollouts failed; the first: {greedy[0].error}")
        return [replace(t, greedy_reward=rewards[t.id.instance_id]) for t in with_baseline]
