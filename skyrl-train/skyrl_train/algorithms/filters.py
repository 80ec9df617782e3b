"""Filter trajectories and correct their rewards before they become a batch.

A filter only sets the loss mask to 0. The rewards still count in the group's baseline. Invalid trajectories are not
changed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from skyrl_train.types import StopReason, Trajectory, last_sampled


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


def zero_reward_on_non_stop(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Set all rewards to 0 in trajectories whose last turn did not end with the stop reason `stop`."""
    return [
        replace(
            t,
            segments=tuple(replace(s, rewards=[0.0] * len(s.rewards)) for s in t.segments),
            reward_components=dict.fromkeys(t.reward_components, 0.0),
        )
        if t.is_valid and t.last_stop_reason != StopReason.STOP
        else t
        for t in trajectories
    ]


def soft_overlong_punishment(n_tokens: int, max_tokens: int, buffer: int, factor: float) -> float:
    """Return the punishment of a reply, -factor · clip((n_tokens - (max_tokens - buffer)) / buffer, 0, 1).

    It starts `buffer` tokens before the limit and grows linearly to `factor` at the limit:

    >>> [soft_overlong_punishment(n, max_tokens=100, buffer=20, factor=1.0) for n in (80, 90, 100)]
    [0.0, -0.5, -1.0]

    Source: DAPO (Yu et al., 2025, arXiv:2503.14476), equation 13.
    """
    excess = n_tokens - (max_tokens - buffer)
    return -factor * min(excess / buffer, 1.0) if excess > 0 else 0.0


def punish_overlong(
    trajectories: Iterable[Trajectory], max_generate_length: int, buffer: int, factor: float
) -> list[Trajectory]:
    """Add the soft overlong punishment to the reward of each trajectory's last sampled token.

    `max_generate_length` limits each turn, so the longest turn counts. A trajectory without turns counts as one turn
    with the length of its loss mask, so call this before `leave_out_truncated`. If the environment reports reward
    components, the punishment becomes one more component, `overlong`.
    """
    punished = []
    for t in trajectories:
        if t.is_valid:
            last = t.segments[-1]
            if last.turns:
                n_tokens = max(turn.end - turn.start for turn in t.turns)
                position = last_sampled(last.loss_mask, last.turns[-1].end)
            else:
                n_tokens, position = sum(last.loss_mask), last_sampled(last.loss_mask)
            penalty = soft_overlong_punishment(n_tokens, max_generate_length, buffer, factor)
            rewards = list(last.rewards)
            if penalty:
                rewards[position] += penalty
            components = t.reward_components
            if components:
                components = {**components, "overlong": penalty}
            segments = (*t.segments[:-1], replace(last, rewards=rewards))
            t = replace(t, segments=segments, reward_components=components)
        punished.append(t)
    return punished
