"""Filters of trajectories and corrections of their rewards, before they become a batch.

A filter only sets the loss mask to 0: the rewards still count in the baseline of the group. Invalid trajectories are
not changed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from skyrl_train.types import Trajectory, last_sampled


def informative_groups(rewards: Sequence[float], draws: Sequence[int], tolerance: float) -> set[int]:
    """Return the draws whose trajectories got unequal total rewards; a group of equal ones has advantages of 0.

    `rewards` and `draws` have one entry for each trajectory. Rewards are equal if their population standard deviation
    is at most `tolerance`. A group of one is kept.

    Source: DAPO (Yu et al., 2025, arXiv:2503.14476), section 3.2.
    """
    groups: dict[int, list[float]] = {}
    for reward, draw in zip(rewards, draws, strict=True):
        groups.setdefault(draw, []).append(reward)
    return {draw for draw, group in groups.items() if len(group) == 1 or statistics.pstdev(group) > tolerance}


def leave_out_truncated(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Set the loss mask of trajectories whose last turn was cut off (stop reason `length`) to 0.

    The reward of a truncated reply is no measure of its tokens.

    Source: overlong filtering in DAPO (Yu et al., 2025, arXiv:2503.14476), section 3.4.
    """
    return [
        replace(t, segments=tuple(replace(s, loss_mask=[0] * len(s.loss_mask)) for s in t.segments))
        if t.is_valid and t.last_stop_reason == "length"
        else t
        for t in trajectories
    ]


def zero_reward_on_non_stop(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Set all rewards of trajectories whose last turn did not end by itself (stop reason `stop`) to 0."""
    return [
        replace(
            t,
            segments=tuple(replace(s, rewards=[0.0] * len(s.rewards)) for s in t.segments),
            reward_components=dict.fromkeys(t.reward_components, 0.0),
        )
        if t.is_valid and t.last_stop_reason != "stop"
        else t
        for t in trajectories
    ]


def soft_overlong_punishment(n_tokens: int, max_tokens: int, buffer: int, factor: float) -> float:
    """Return the punishment of a reply, -factor · clip((n_tokens - (max_tokens - buffer)) / buffer, 0, 1).

    Source: DAPO (Yu et al., 2025, arXiv:2503.14476), equation 13.
    """
    excess = n_tokens - (max_tokens - buffer)
    return -factor * min(excess / buffer, 1.0) if excess > 0 else 0.0


def punish_overlong(
    trajectories: Iterable[Trajectory], max_generate_length: int, buffer: int, factor: float
) -> list[Trajectory]:
    """Add the soft overlong punishment of its longest turn to the reward of each trajectory's last sampled token.

    `max_generate_length` limits turns, so the longest one counts. A trajectory without turns counts as one turn of the
    tokens in its loss mask, so leave out truncated ones afterwards. If the environment reports components of the
    reward, the punishment is one more of them, `overlong`.
    """
    return [_punish(t, max_generate_length, buffer, factor) if t.is_valid else t for t in trajectories]


def _punish(trajectory: Trajectory, max_tokens: int, buffer: int, factor: float) -> Trajectory:
    last = trajectory.segments[-1]
    if last.turns:
        n_tokens = max(turn.end - turn.start for turn in trajectory.turns)
        position = last_sampled(last.loss_mask, last.turns[-1].end)
    else:
        n_tokens, position = sum(last.loss_mask), last_sampled(last.loss_mask)
    penalty = soft_overlong_punishment(n_tokens, max_tokens, buffer, factor)
    components = trajectory.reward_components
    if components:
        components = {**components, "overlong": penalty}
    rewards = list(last.rewards)
    if penalty:
        rewards[position] += penalty
    segments = (*trajectory.segments[:-1], replace(last, rewards=rewards))
    return replace(trajectory, segments=segments, reward_components=components)
