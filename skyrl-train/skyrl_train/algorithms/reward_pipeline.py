"""Every change of a reward between the environment and the advantage. The stages run in this order:

    1  weigh_components         each turn        weighted sum of an environment's or agent's reward components
    2  add_final_reward         each rollout     `grade_unfinished` of an episode that was cut off
    3  place_turn_rewards       each rollout     from turns to tokens
    4  add_function_reward      rollouts         each of `generator.reward_functions`, the reward model last
    5  zero_reward_on_non_stop  rollouts         0 for replies that were cut off, `generator.zero_reward_on_non_stop`
    6  reject_unusable          rollouts         invalid without a response, or if NaN, infinite or too large
    7  punish_overlong          groups           DAPO's soft punishment, `trainer.algorithm.overlong_buffer_len`
    8  penalize_rewards         batch            minus the KL penalty, `trainer.algorithm.use_kl_in_reward`

Stages 1 to 5 belong to the generators and agents, 6 to `RolloutGenerator.play`, 7 to the source of the step's groups,
and 8 to the learner. Everything else only reads rewards: metrics and dynamic sampling after stage 6, the zero-variance
filter after stage 7, and the advantage estimator after stage 8. Greedy baselines go through stages 1 to 7.

A subclass of SkyRL's trainer may replace stage 7 (`postprocess_generator_output`) and stage 8
(`apply_reward_kl_penalty`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from skyrl_gym.runtime.validation import MAX_REWARD, is_reward
from skyrl_train.algorithms.kl import KLEstimator, compute_approx_kl
from skyrl_train.lazy import no_grad, torch
from skyrl_train.types import Segment, StopReason, Trajectory, Turn, last_sampled

EMPTY_RESPONSE = StopReason.EMPTY_RESPONSE, "the response is empty and cannot carry a reward"
"""Stop reason and error of a trajectory without a token for its reward."""

Reward = float | list[float]
"""Reward of a turn or a response, or of each of its tokens."""


def weigh_components(reward: Reward, components: Mapping[str, float], weights: Mapping[str, float]) -> Reward:
    """Return the weighted sum of the components (default weight 1) if any of them has a weight, else the reward."""
    if not weights.keys() & components.keys():
        return reward
    return sum(weights.get(name, 1.0) * value for name, value in components.items())


def add_final_reward(turn: Turn, reward: float) -> None:
    """Add a reward to the last token of a rollout's last turn."""
    if isinstance(turn.reward, list):
        turn.reward = [*turn.reward[:-1], turn.reward[-1] + reward]
    else:
        turn.reward += reward


def place_turn_rewards(segments: Sequence[Segment], turns: Iterable[Turn]) -> None:
    """Add the rewards of finished turns to the segments' tokens, whose rewards are 0 before.

    A turn's reward goes to its last sampled token, or token by token if it is a list. If all tokens of a turn were
    replaced, its reward goes to the last sampled token before the turn.
    """
    for turn in turns:
        segment, reward = segments[turn.segment], turn.reward
        total = turn.reward = sum(reward) if isinstance(reward, list) else reward
        if isinstance(reward, list) and len(reward) == turn.end - turn.start:
            for position, value in enumerate(reward, turn.start):
                segment.rewards[position] += value
        elif segment.rewards:
            segment.rewards[last_sampled(segment.loss_mask, turn.end)] += total


def add_function_reward(trajectory: Trajectory, name: str, reward: Reward | None, weight: float) -> Trajectory:
    """Add the result of a reward function, and report it as a component. An unknown reward (None) makes it invalid."""
    if reward is None:
        error = f"reward function {name} returned no reward"
        return replace(trajectory, stop_reason=StopReason.REWARD_UNKNOWN, error=error)
    last = trajectory.segments[-1]
    rewards = list(last.rewards)
    if isinstance(reward, list):
        rewards = [old + weight * value for old, value in zip(rewards, reward, strict=True)]
    elif rewards:
        rewards[last_sampled(last.loss_mask)] += weight * reward
    total = sum(reward) if isinstance(reward, list) else reward
    return _replace_rewards(trajectory, rewards, {**trajectory.reward_components, name: total})


def zero_reward_on_non_stop(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Set all rewards to 0 in trajectories whose last turn has a stop reason other than `stop`."""
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


def reject_unusable(trajectory: Trajectory) -> Trajectory:
    """Make a trajectory invalid if its response is empty or its reward is NaN, infinite or too large for float32."""
    if not trajectory.is_valid:
        return trajectory
    if not trajectory.response_ids:
        stop_reason, error = EMPTY_RESPONSE
    elif not is_reward(trajectory.total_reward):
        stop_reason = StopReason.ENV_ERROR
        error = f"its reward {trajectory.total_reward:g} must be finite and of magnitude <= {MAX_REWARD:.0e}"
    else:
        return trajectory
    return replace(trajectory, stop_reason=stop_reason, error=error)


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
    """Add the soft overlong punishment to the reward of each valid trajectory's last sampled token.

    `max_generate_length` limits each turn, so the longest turn counts. A trajectory without turns counts as one turn
    with the length of its loss mask. If the environment reports reward components, the punishment becomes one more
    component, `overlong`.
    """
    punished = []
    for t in trajectories:
        if not t.is_valid:
            punished.append(t)
            continue
        last = t.segments[-1]
        if last.turns:
            n_tokens = max(turn.end - turn.start for turn in t.turns)
            position = last_sampled(last.loss_mask, last.turns[-1].end)
        else:
            n_tokens, position = sum(last.loss_mask), last_sampled(last.loss_mask)
        penalty = soft_overlong_punishment(n_tokens, max_generate_length, buffer, factor)
        rewards, components = list(last.rewards), t.reward_components
        if penalty:
            rewards[position] += penalty
        if components:
            components = {**components, "overlong": penalty}
        punished.append(_replace_rewards(t, rewards, components))
    return punished


@no_grad
def penalize_rewards(
    rewards: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    loss_mask: torch.Tensor,
    coefficient: float,
    estimator: KLEstimator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rewards - coefficient · KL, and the KL, both (B, R). The KL is 0 outside the mask.

    Source: Fine-Tuning Language Models from Human Preferences (Ziegler et al., 2019, arXiv:1909.08593), section 2.
    """
    kl = compute_approx_kl(old_log_probs, ref_log_probs, loss_mask, estimator)
    return rewards - coefficient * kl, kl


def _replace_rewards(trajectory: Trajectory, rewards: list[float], components: dict[str, float]) -> Trajectory:
    """Return the trajectory with other rewards in its last segment."""
    segments = (*trajectory.segments[:-1], replace(trajectory.segments[-1], rewards=rewards))
    return replace(trajectory, segments=segments, reward_components=components)
