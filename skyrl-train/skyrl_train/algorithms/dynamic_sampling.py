"""Dynamic sampling: prompts are drawn until enough groups of trajectories teach something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from skyrl_train.algorithms.filters import informative_groups
from skyrl_train.config.algorithm import DynamicSamplingConfig
from skyrl_train.errors import DataError
from skyrl_train.types import Trajectory, TrajectoryID

Group = list[Trajectory]  # the trajectories of one prompt


class GroupCollector:
    """Collects the groups of one step, from one or more batches of rollouts.

    A group is good if its rewards are not all equal (see `filters.informative_groups`). What happens to the others is
    `dynamic_sampling.type`:

    null      they are taken with the rest: one batch is the step.
    filter    they are dropped; batches are added until `n_prompts` good groups are there. The surplus is dropped too.
    replace   if more than `min_replace_ratio` of `n_prompts` groups are good, copies of randomly chosen ones take the
              places of the others, and of prompts that are missing: of different ones while there are enough. Else
              the whole batch is dropped and another one added. A copy is a group of its own: "17#2" is the first copy
              of "17", and so never merges with it.

    Every prompt that is drawn has a uid of its own, also one that is drawn again in the same step.

    Source: DAPO (Yu et al., 2025, arXiv:2503.14476), section 3.2, for filter.
    """

    def __init__(self, config: DynamicSamplingConfig, tolerance: float, n_prompts: int, random: Random) -> None:
        """`tolerance` is the standard deviation up to which rewards count as equal; `random` chooses the copies."""
        self._config = config
        self._tolerance = tolerance
        self._n_prompts = n_prompts
        self._random = random
        self._groups: list[Group] = []
        self._seen: set[str] = set()
        self._n_batches = 0
        self._n_good = 0
        self._n_copies = 0
        self._is_complete = False

    @property
    def is_complete(self) -> bool:
        """Whether the step has all the groups it needs."""
        return self._is_complete

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Add one batch of valid trajectories; those of a prompt share `id.instance_id`.

        Raises:
            DataError: `max_sample_batches` batches were not enough.
        """
        assert not self._is_complete, "the step is complete: take() its trajectories"
        groups = _by_prompt(trajectories)
        assert not self._seen & groups.keys(), f"drawn twice under one uid: {sorted(self._seen & groups.keys())}"
        self._seen |= groups.keys()
        self._n_batches += 1
        uids = [t.id.instance_id for t in trajectories]
        good = informative_groups([t.total_reward for t in trajectories], uids, self._tolerance)
        self._n_good += len(good)
        match self._config.type:
            case None:
                self._groups, self._is_complete = list(groups.values()), True
            case "filter":
                self._groups += [group for uid, group in groups.items() if uid in good]
                self._is_complete = len(self._groups) >= self._n_prompts
            case "replace":
                if len(good) >= self._n_prompts or len(good) > self._config.min_replace_ratio * self._n_prompts:
                    self._groups, self._is_complete = self._filled_up(groups, good), True
        if not self._is_complete and self._n_batches == self._config.max_sample_batches:
            raise DataError(self._why_it_is_not_enough())

    def take(self) -> list[Trajectory]:
        """The trajectories of the step, the groups in the order they were collected in."""
        assert self._is_complete, "more batches are needed"
        return [t for group in self._taken for t in group]

    def metrics(self) -> dict[str, float]:
        """How the step came about; groups taken = sampled - dropped + replaced.

        generate/n_sample_batches   batches of prompts that were sampled
        generate/n_groups_dropped   groups that were sampled and are not learned from
        generate/n_groups_replaced  groups that are learned from as copies of others
        generate/signal_ratio       share of all sampled groups whose rewards are not equal
        """
        n_originals = len(self._taken) - self._n_copies
        return {
            "generate/n_sample_batches": float(self._n_batches),
            "generate/n_groups_dropped": float(len(self._seen) - n_originals),
            "generate/n_groups_replaced": float(self._n_copies),
            "generate/signal_ratio": self._n_good / max(len(self._seen), 1),
        }

    @property
    def _taken(self) -> list[Group]:
        return self._groups if self._config.type is None else self._groups[: self._n_prompts]

    def _filled_up(self, groups: dict[str, Group], good: set[str]) -> list[Group]:
        """`n_prompts` groups: the good ones in their places, copies of some of them in all others."""
        sources = [group for uid, group in groups.items() if uid in good]
        self._n_copies = max(self._n_prompts - len(sources), 0)
        is_enough = len(sources) >= self._n_copies
        choose = self._random.sample if is_enough else self._random.choices
        copies = iter(_copies(choose(sources, k=self._n_copies)))
        there = [groups[uid] if uid in good else next(copies, []) for uid in groups]
        return [*(group for group in there if group), *copies]

    def _why_it_is_not_enough(self) -> str:
        config = self._config
        needed = f"{self._n_prompts}"
        if config.type == "replace":
            needed = f"more than {config.min_replace_ratio * self._n_prompts:g} in one batch"
        return (
            f"dynamic sampling drew {self._n_batches} batches of prompts for one step, and {self._n_good} of their "
            f"{len(self._seen)} groups have unequal rewards where trainer.algorithm.dynamic_sampling.type={config.type}"
            f" needs {needed}. Are the prompts far too easy or too hard for the policy? Are its samples all the same "
            "(generator.sampling_params.temperature, generator.n_samples_per_prompt)? Else raise "
            f"trainer.algorithm.dynamic_sampling.max_sample_batches={config.max_sample_batches}; -1 never stops"
        )


def _by_prompt(trajectories: Sequence[Trajectory]) -> dict[str, Group]:
    """The trajectories of each uid, in the order of first appearance."""
    groups: dict[str, Group] = {}
    for t in trajectories:
        groups.setdefault(t.id.instance_id, []).append(t)
    return groups


def _copies(sources: Sequence[Group]) -> list[Group]:
    """Each group once more for every time it is listed, under a uid of its own."""
    n_copies: dict[str, int] = {}
    copies = []
    for group in sources:
        uid = group[0].id.instance_id
        n_copies[uid] = n_copies.get(uid, 1) + 1
        copy_uid = f"{uid}#{n_copies[uid]}"
        copies.append([replace(t, id=TrajectoryID(copy_uid, t.id.repetition_id)) for t in group])
    return copies


def original_uid(uid: str) -> str:
    """The group that a group is a copy of; an original is its own: "17#2" and "17" are "17"."""
    return uid.partition("#")[0]
