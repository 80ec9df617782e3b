"""Filters for trajectories that would teach nothing or something wrong, and dynamic sampling, which replaces them.

A filter only sets the loss mask to 0, so the rewards still count in the group's baseline. Dynamic sampling draws
prompts until enough groups have unequal rewards. `reward_pipeline` has the stages that change rewards.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

from skyrl_train.config.algorithm import DynamicSamplingConfig
from skyrl_train.errors import DataError
from skyrl_train.types import StopReason, Trajectory

Group = list[Trajectory]  # the trajectories of one prompt


def informative_groups(rewards: Sequence[float], draws: Sequence[int], tolerance: float) -> set[int]:
    """Return the draws whose trajectories have unequal total rewards. With equal rewards, all advantages would be 0.

    `rewards` and `draws` have one entry per trajectory. Rewards are equal if their population standard deviation is at
    most `tolerance`. A group of one is kept.

    >>> informative_groups(rewards=[1, 1, 0, 1, 0], draws=[7, 7, 8, 8, 9], tolerance=1e-6)
    {8, 9}

    Source: DAPO (Yu et al., 2025, arXiv:2503.14476), section 3.2.
    """
    groups: dict[int, list[float]] = {}
    for reward, draw in zip(rewards, draws, strict=True):
        groups.setdefault(draw, []).append(reward)
    return {draw for draw, group in groups.items() if len(group) == 1 or statistics.pstdev(group) > tolerance}


def leave_out_truncated(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Set the loss mask to 0 in trajectories whose last turn was cut off (stop reason `length`).

    The reward of a truncated reply is not evidence about its tokens.

    Source: overlong filtering in DAPO (Yu et al., 2025, arXiv:2503.14476), section 3.4.
    """
    return [
        replace(t, segments=tuple(replace(s, loss_mask=[0] * len(s.loss_mask)) for s in t.segments))
        if t.is_valid and t.last_stop_reason == StopReason.LENGTH
        else t
        for t in trajectories
    ]


class GroupCollector:
    """Collector of the groups of one step, from one or more batches of rollouts.

    A group holds the trajectories of one draw. It is good if its rewards are not all equal
    (`informative_groups`). `dynamic_sampling.type` decides what happens to groups that are not good:

    null      They are kept. The step is one batch.
    filter    They are dropped. Batches are added until there are `n_prompts` good groups, and surplus ones are dropped.
    replace   They are replaced by copies of randomly chosen good groups, as are missing prompts, if more than
              `min_replace_ratio` of `n_prompts` groups are good. No group is copied twice while there are enough. With
              fewer good groups, the whole batch is dropped and the next one tried. A copy has the draw of the group
              that it replaces, so it never merges with its original.

    Example: `n_prompts` is 4, and a batch has good groups a, b and c. `filter` keeps them and samples another batch.
    `replace` with `min_replace_ratio` 0.5 completes the step with a copy of one of them.

    Source: DAPO (Yu et al., 2025, arXiv:2503.14476), section 3.2, for filter.
    """

    def __init__(self, config: DynamicSamplingConfig, tolerance: float, n_prompts: int, random: Random) -> None:
        """Start a step. Rewards with a standard deviation up to `tolerance` are equal. `random` selects copies."""
        self._config = config
        self._tolerance = tolerance
        self._n_prompts = n_prompts
        self._random = random
        self._groups: list[Group] = []
        self._seen: set[int] = set()
        self._n_batches = 0
        self._n_good = 0
        self._n_copies = 0
        self.is_complete = False  # True once the step has enough groups

    def add(self, trajectories: Sequence[Trajectory], draws: Sequence[int]) -> None:
        """Add one batch of valid trajectories. `draws` lists all draws, even those without a valid trajectory.

        Raises:
            DataError: `max_sample_batches` batches were not enough.
        """
        assert not self.is_complete, "the step is complete: take() its trajectories"
        assert not self._seen & set(draws), f"drawn twice: {sorted(self._seen & set(draws))}"
        groups: dict[int, Group] = {}
        for t in trajectories:
            groups.setdefault(t.id.draw, []).append(t)
        self._seen |= groups.keys()
        self._n_batches += 1
        good = informative_groups(
            [t.total_reward for t in trajectories], [t.id.draw for t in trajectories], self._tolerance
        )
        self._n_good += len(good)
        match self._config.type:
            case None:
                self._groups, self.is_complete = list(groups.values()), True
            case "filter":
                self._groups += [group for draw, group in groups.items() if draw in good]
                self.is_complete = len(self._groups) >= self._n_prompts
            case "replace":
                if len(good) >= self._n_prompts or len(good) > self._config.min_replace_ratio * self._n_prompts:
                    self._groups, self.is_complete = self._fill_up(groups, good, draws), True
        if not self.is_complete and self._n_batches == self._config.max_sample_batches:
            needed = f"{self._n_prompts}"
            if self._config.type == "replace":
                needed = f"more than {self._config.min_replace_ratio * self._n_prompts:g} in one batch"
            raise DataError(
                f"dynamic sampling drew {self._n_batches} batches of prompts for one step, and {self._n_good} of their "
                f"{len(self._seen)} groups have unequal rewards where "
                f"trainer.algorithm.dynamic_sampling.type={self._config.type} needs {needed}. Are the prompts far too "
                "easy or too hard for the policy? Are its samples all the same (generator.sampling_params.temperature, "
                "generator.n_samples_per_prompt)? Else raise trainer.algorithm.dynamic_sampling.max_sample_batches="
                f"{self._config.max_sample_batches}; -1 never stops"
            )

    def take(self) -> list[Trajectory]:
        """Return the trajectories of the step, group by group in the order of collection."""
        assert self.is_complete, "more batches are needed"
        return [t for group in self._trained_groups for t in group]

    def metrics(self) -> dict[str, float]:
        """Return metrics of the step, where groups trained on = sampled - dropped + replaced.

        generate/n_sample_batches   sampled batches of prompts
        generate/n_groups_dropped   sampled groups that are not trained on
        generate/n_groups_replaced  groups that are copies of good groups
        generate/signal_ratio       fraction of sampled groups whose rewards are not all equal
        """
        n_originals = len(self._trained_groups) - self._n_copies
        return {
            "generate/n_sample_batches": float(self._n_batches),
            "generate/n_groups_dropped": float(len(self._seen) - n_originals),
            "generate/n_groups_replaced": float(self._n_copies),
            "generate/signal_ratio": self._n_good / max(len(self._seen), 1),
        }

    @property
    def _trained_groups(self) -> list[Group]:
        return self._groups if self._config.type is None else self._groups[: self._n_prompts]

    def _fill_up(self, groups: dict[int, Group], good: set[int], draws: Sequence[int]) -> list[Group]:
        """Return `n_prompts` groups in the order of their draws: the good groups, and copies in all other places."""
        sources = [group for draw, group in groups.items() if draw in good]
        vacant = [draw for draw in draws if draw not in good]
        self._n_copies = min(max(self._n_prompts - len(sources), 0), len(vacant))
        choose = self._random.sample if len(sources) >= self._n_copies else self._random.choices
        copies = zip(vacant, choose(sources, k=self._n_copies), strict=False)
        filled = {draw: [replace(t, id=replace(t.id, draw=draw)) for t in source] for draw, source in copies}
        filled |= {draw: groups[draw] for draw in good}
        return [filled[draw] for draw in draws if draw in filled]
