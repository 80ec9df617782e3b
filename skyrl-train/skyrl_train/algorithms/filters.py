"""What not to learn from, and what to make of replies that were cut off: on trajectories, before they are a batch.

Trajectories are left out by their loss mask alone: their rewards still count in the baseline of their group. Invalid
ones pass unchanged.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from skyrl_train.types import Trajectory, last_sampled


def informative_groups(rewards: Sequence[float], draws: Sequence[int], tolerance: float) -> set[int]:
    """Return the draws whose trajectories got unequal total rewards: a group of equal ones has advantages of 0.

    `rewards` and `draws` have one entry for each trajectory. Equal means that the standard deviation (that of the
    group, not an estimate) is at most `tolerance`. A group of one has nothing to be equal to, and is kept.

    Source: DAPO (Yu et al., 2025, arXiv:2503.14476), section 3.2.
    """
    groups: dict[int, list[float]] = {}
    for reward, draw in zip(rewards, draws, strict=True):
        groups.setdefault(draw, []).append(reward)
    return {draw for draw, group in groups.items() if len(group) == 1 or statistics.pstdev(group) > tolerance}


def leave_out_truncated(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Put a loss mask of zeros on trajectories whose last turn was cut off (stop reason `length`).

    What a reply that was cut off would have earned is unknown, so its reward says nothing about its tokens. An empty
    response has no token to learn from in the first place.

    Source: overlong filtering in DAPO (Yu et al., 2025, arXiv:2503.14476), section 3.4.
    """
    return [_left_out(t) if t.is_valid and t.last_stop_reason == "length" else t for t in trajectories]


def _left_out(trajectory: Trajectory) -> Trajectory:
    segments = tuple(replace(s, loss_mask=[0] * len(s.loss_mask)) for s in trajectory.segments)
    return replace(trajectory, segments=segments)


def zero_reward_on_non_stop(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Set all rewards of trajectories whose last turn did not end by itself (stop reason `stop`) to 0."""
    return [_without_reward(t) if t.is_valid and t.last_stop_reason != "stop" else t for t in trajectories]


def _without_reward(trajectory: Trajectory) -> Trajectory:
    return replace(
        trajectory,
        segments=tuple(replace(s, rewards=[0.0] * len(s.rewards)) for s in trajectory.segments),
        reward_components=dict.fromkeys(trajectory.reward_components, 0.0),
    )


def soft_overlong_punishment(n_tokens: int, max_tokens: int, buffer: int, factor: float) -> float:
    """What a reply of `n_tokens` is punished with, from -factor to 0.

    Nothing up to max_tokens - buffer, then linearly more until -factor at `max_tokens` and beyond:
    -factor · clip((n_tokens - (max_tokens - buffer)) / buffer, 0, 1).

    Source: DAPO (Yu et al., 2025, arXiv:2503.14476), equation 13.
    """
    excess = n_tokens - (max_tokens - buffer)
    return -factor * min(excess / buffer, 1.0) if excess > 0 else 0.0


def punish_overlong(
    trajectories: Iterable[Trajectory], max_generate_length: int, buffer: int, factor: float
) -> list[Trajectory]:
    """Add the soft overlong punishment of its longest turn to the reward of each trajectory's last sampled token.

    The limit `max_generate_length` is one on turns, so the longest turn is what comes near it; a trajectory that says
    nothing about its turns is taken as one, of the tokens in its loss mask, so leave out truncated ones afterwards.
    Where the environment reports components of the reward, the punishment is one more of them, `overlong`.
    """
    return [_punished(t, max_generate_length, buffer, factor) if t.is_valid else t for t in trajectories]


def _punished(trajectory: Trajectory, max_tokens: int, buffer: int, factor: float) -> Trajectory:
    last = trajectory.segments[-1]
    if last.turns:
        n_tokens = max(turn.end - turn.start for turn in trajectory.turns)
        end = last.turns[-1].end
    else:
        n_tokens, end = sum(last.loss_mask), last_sampled(last.loss_mask) + 1
    penalty = soft_overlong_punishment(n_tokens, max_tokens, buffer, factor)
    components = trajectory.reward_components
    if components:
        components = {**components, "overlong": penalty}
    rewards = list(last.rewards)
    if penalty:
        rewards[end - 1] += penalty
    segments = (*trajectory.segments[:-1], replace(last, rewards=rewards))
    return replace(trajectory, segments=segments, reward_components=components)
