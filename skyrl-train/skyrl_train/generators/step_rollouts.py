"""From prompts to the trajectories of a step: play, leave out what failed, and sample again where asked to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl_train.algorithms.contract import estimator_traits
from skyrl_train.algorithms.dynamic_sampling import GroupCollector, original_uid
from skyrl_train.algorithms.filters import punish_overlong
from skyrl_train.config import SkyRLConfig
from skyrl_train.dataset.prompts import PromptOrder
from skyrl_train.errors import EnvError
from skyrl_train.generators.base import BatchMetadata, GeneratorInterface, RolloutRequest, rollout_requests
from skyrl_train.inference_engines.base import SamplingParams
from skyrl_train.types import PromptRow, Trajectory, TrajectoryID


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The rollouts of one step."""

    rollouts: list[Trajectory]  # to learn from, the samples of a prompt side by side
    played: list[Trajectory]  # everything, the invalid ones and those of dropped groups too
    metrics: dict[str, float]


class RolloutSampler:
    """Plays G trajectories of each prompt; dynamic sampling goes on until enough groups teach something."""

    def __init__(
        self,
        cfg: SkyRLConfig,
        generator: GeneratorInterface,
        prompts: PromptOrder,
        *,
        with_greedy_rewards: bool = False,
    ) -> None:
        """`prompts` is where dynamic sampling takes more; `with_greedy_rewards` plays every prompt greedily too."""
        self._cfg = cfg
        self._generator = generator
        self._prompts = prompts
        self._with_greedy_rewards = with_greedy_rewards
        self._sampling = SamplingParams.from_config(cfg.generator.sampling_params)

    async def sample(self, prompts: Sequence[PromptRow], step: int) -> StepRollouts:
        """The rollouts of one step.

        Invalid trajectories are counted and left out, and so is one whose whole group failed: it has nothing to be
        compared with.

        Raises:
            EnvError: a batch left nothing to learn from.
        """
        trainer = self._cfg.trainer
        metadata = BatchMetadata(step, "train", trainer.seed)
        algorithm = trainer.algorithm
        collector = GroupCollector(
            algorithm.dynamic_sampling,
            algorithm.zero_variance_filter_tol,
            trainer.train_batch_size,
            random.Random(f"{trainer.seed}/{step}"),
        )
        drawn: Counter[str] = Counter()
        rows: dict[str, PromptRow] = {}
        played: list[Trajectory] = []
        n_alone = 0
        while True:
            batch = _with_own_uids(prompts, drawn)
            rows |= {row.uid: row for row in batch}
            trajectories = await self._play(self._requests(batch), self._sampling, metadata)
            usable, n_more = self._usable(trajectories, step)
            played, n_alone = played + trajectories, n_alone + n_more
            collector.add(usable)
            if collector.is_complete:
                break
            prompts = self._prompts.next_batch()
        rollouts = self._punished(collector.take())
        metrics = {"generate/n_left_alone": float(n_alone), **collector.metrics()}
        if self._with_greedy_rewards:
            n_taken = len(rollouts)
            rollouts = await self._add_greedy_rewards(rollouts, rows, metadata)
            metrics["generate/n_without_baseline"] = float(n_taken - len(rollouts))
        return StepRollouts(rollouts, played, self._generator.take_metrics() | metrics)

    def _requests(self, prompts: Sequence[PromptRow]) -> list[RolloutRequest]:
        return rollout_requests(prompts, self._cfg.generator.n_samples_per_prompt, self._cfg.environment.env_class)

    async def _play(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, metadata: BatchMetadata
    ) -> list[Trajectory]:
        return await self._generator.rollout(requests, sampling, metadata)

    def _usable(self, trajectories: Sequence[Trajectory], step: int) -> tuple[list[Trajectory], int]:
        """The valid trajectories that have something to be compared with, and how many valid ones have not."""
        n_samples = self._cfg.generator.n_samples_per_prompt
        compares = estimator_traits(self._cfg.trainer.algorithm).compares_samples
        n_needed = 2 if compares and n_samples > 1 else 1
        n_valid = Counter(t.id.instance_id for t in trajectories if t.is_valid)
        usable = [t for t in trajectories if t.is_valid and n_valid[t.id.instance_id] >= n_needed]
        if not usable:
            failures = [t.error for t in trajectories if not t.is_valid]
            raise EnvError(
                f"{len(failures)} of {len(trajectories)} rollouts of step {step} failed and none is left "
                f"to learn from; the first: {failures[0]}. Fix the environment and resume"
            )
        return usable, n_valid.total() - len(usable)

    def _punished(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """With the soft overlong punishment, if there is one."""
        algorithm, sampling = self._cfg.trainer.algorithm, self._cfg.generator.sampling_params
        if algorithm.overlong_buffer_len is None:
            return trajectories
        buffer, factor = algorithm.overlong_buffer_len, algorithm.overlong_buffer_penalty_factor
        return punish_overlong(trajectories, sampling.max_generate_length, buffer, factor)

    async def _add_greedy_rewards(
        self, rollouts: Sequence[Trajectory], rows: dict[str, PromptRow], metadata: BatchMetadata
    ) -> list[Trajectory]:
        """Rollouts that know what a greedy one of their prompt was rewarded; those of a prompt where it failed go."""
        n_samples = self._cfg.generator.n_samples_per_prompt
        uids = dict.fromkeys(original_uid(t.id.instance_id) for t in rollouts)
        requests = [
            replace(request, id=TrajectoryID(request.row.uid, n_samples))  # beside the samples
            for request in rollout_requests([rows[uid] for uid in uids], 1, self._cfg.environment.env_class)
        ]
        greedy = self._punished(await self._play(requests, replace(self._sampling, temperature=0.0), metadata))
        rewards = {t.id.instance_id: t.total_reward for t in greedy if t.is_valid}
        with_baseline = [t for t in rollouts if original_uid(t.id.instance_id) in rewards]
        if not with_baseline:
            raise EnvError(f"all {len(greedy)} greedy rollouts failed; the first: {greedy[0].error}")
        return [replace(t, greedy_reward=rewards[original_uid(t.id.instance_id)]) for t in with_baseline]


def _with_own_uids(prompts: Sequence[PromptRow], drawn: Counter[str]) -> list[PromptRow]:
    """Rows whose uid no other group of the step has: a prompt that is drawn again in it, "17", becomes "17@2"."""
    rows = []
    for row in prompts:
        drawn[row.uid] += 1
        n_times = drawn[row.uid]
        rows.append(row if n_times == 1 else replace(row, uid=f"{row.uid}@{n_times}"))
    return rows
