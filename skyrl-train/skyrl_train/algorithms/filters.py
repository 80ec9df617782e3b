"""Filters for trajectories that would teach nothing or something wrong.

A filter only sets the loss mask to 0, so the rewards still count in the group's baseline. `reward_pipeline` has the
stages that change rewards.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from skyrl_train.types import StopReason, Trajectory


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
