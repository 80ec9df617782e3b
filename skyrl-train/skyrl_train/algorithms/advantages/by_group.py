"""Estimators that compare the score of a trajectory with its group: one advantage for all its tokens."""

from __future__ import annotations

from typing import Any

from skyrl_train.algorithms.advantages.groups import (
    ROUNDING,
    are_equal,
    group_statistics,
    on_sampled_tokens,
    prompt_groups,
    trajectory_scores,
)
from skyrl_train.algorithms.masked import masked_whiten
from skyrl_train.algorithms.registry import register_advantage_estimator
from skyrl_train.lazy import torch


@register_advantage_estimator("grpo", compares="samples", per_token=False, whitens=False)
def grpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: list[str],
    grpo_norm_by_std: bool = True,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute group-relative advantages: A = (S - mean_group(S)) / (std_group(S) + 1e-6), the same for every token.

    S is the sum of a trajectory's rewards, std the unbiased one; `grpo_norm_by_std=false` leaves the division
    out. A group of one has no baseline: its advantage is S itself. A group of equal rewards gets exactly 0; by the
    formula alone it would get the rounding of their sums, divided by 1e-6.

    Source: DeepSeekMath (Shao et al., 2024, arXiv:2402.03300), section 4.1; without the division, Dr. GRPO
    (Liu et al., 2025, arXiv:2503.20783).
    """
    scores = trajectory_scores(token_level_rewards, response_mask)  # (B,)
    return _same_for_every_token(group_normalized(scores, index, grpo_norm_by_std), response_mask)


@register_advantage_estimator("rloo", compares="samples", per_token=False, whitens=False)
def rloo(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute REINFORCE leave-one-out advantages: A = S - mean of the other scores = (S - mean_group(S)) · n / (n -
    1).

    S is the sum of a trajectory's rewards, n the size of its group. A group of one has no others: its advantage is 0.

    Source: Buy 4 REINFORCE Samples, Get a Baseline for Free! (Kool et al., 2019); Back to Basics (Ahmadian et al.,
    2024, arXiv:2402.14740).
    """
    centred, size = _centred_scores(token_level_rewards, response_mask, index)
    return _same_for_every_token(centred * size / (size - 1).clamp(min=1), response_mask)


@register_advantage_estimator("reinforce++-baseline", compares="samples", per_token=False, whitens=True)
def reinforce_plus_plus_baseline(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute REINFORCE++ advantages with a group baseline: A = whiten(S - mean_group(S)) over the batch's sampled
    tokens.

    S is the sum of a trajectory's rewards. Whitening weighs trajectories by their length, so it shifts all groups by a
    common mean, and a group of equal rewards is not exactly 0; a batch of such groups only is.

    Source: REINFORCE++ (Hu et al., 2025, arXiv:2501.03262), the variant with baseline.
    """
    centred, _size = _centred_scores(token_level_rewards, response_mask, index)
    advantages = masked_whiten(on_sampled_tokens(centred, response_mask), response_mask)
    return advantages, advantages


@register_advantage_estimator("opo", compares="samples", per_token=False, whitens=False)
def opo(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Subtract the optimal reward baseline: A = S - Σ_group l·S / Σ_group l, with l the number of a trajectory's
    sampled tokens.

    The baseline of least variance weighs each score by the squared norm of its gradient, which grows with length; a
    trajectory whose mask is all 0 weighs nothing. A group of one, or of equal rewards, gets exactly 0.

    Source: On-Policy RL with Optimal Reward Baseline (Hao et al., 2025, arXiv:2505.23585).
    """
    scores = trajectory_scores(token_level_rewards, response_mask)  # (B,)
    lengths = (response_mask > 0).sum(dim=-1).to(scores.dtype)  # (B,)
    groups = prompt_groups(index, scores.device)
    _mean, std, _size = groups.statistics(scores)
    advantages = torch.where(std > 0, scores - groups.weighted_mean(scores, lengths), 0.0)
    return _same_for_every_token(advantages, response_mask)


@register_advantage_estimator("gpg", compares="samples", per_token=False, whitens=False)
def gpg(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group policy gradient: A = α · (S - mean_group(S)), with α = trajectories / trajectories of non-zero score.

    α makes up for trajectories that earned nothing; both counts are of the whole batch, and of trajectories with
    sampled tokens. It presumes rewards of 0 for failure: with -1 for failure it is 1. (In the paper α leaves out the
    trajectories of groups of equal rewards; this is the variant in common use.)

    Source: GPG (Chu et al., 2025, arXiv:2504.02546); its loss is `policy_loss_type=policy_gradient`.
    """
    scores = trajectory_scores(token_level_rewards, response_mask)  # (B,)
    mean, std, _size = group_statistics(scores, index)
    is_trained = (response_mask > 0).any(dim=-1)  # (B,)
    n_scored = (is_trained & (scores.abs() > ROUNDING)).sum()
    alpha = is_trained.sum().to(scores.dtype) / n_scored.clamp(min=1)
    return _same_for_every_token(torch.where(std > 0, (scores - mean) * alpha, 0.0), response_mask)


@register_advantage_estimator("maxrl", compares="samples", per_token=False, whitens=False)
def maxrl(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute maximum-likelihood RL advantages: A = (S - mean_group(S)) / (mean_group(S) - floor + 1e-6), floor =
    min(0, min_group(S)).

    S is the sum of a trajectory's rewards. Without negative rewards the floor is 0 and this is the paper's estimator:
    with rewards of 0 and 1, prompts that are solved with probability p weigh 1/p. With signed rewards the paper's
    denominator, the mean, may be near 0 or negative; scores are therefore counted from the floor. So rewards of ±1 give
    the advantages of rewards of 0 and 1, and a group of n has them within [-1, n - 1].

    A group of equal rewards gets exactly 0; a group of one keeps its score, as in GRPO.

    Source: Maximum Likelihood Reinforcement Learning (Tajwar et al., 2026, arXiv:2602.02710).
    """
    scores = trajectory_scores(token_level_rewards, response_mask)  # (B,)
    groups = prompt_groups(index, scores.device)
    mean, std, size = groups.statistics(scores)
    floor = groups.lowest(scores).clamp(max=0)
    advantages = torch.where(std > 0, (scores - mean) / (mean - floor + 1e-6), 0.0)
    return _same_for_every_token(torch.where(size > 1, advantages, scores), response_mask)


@register_advantage_estimator("grpo_passk", compares="samples", per_token=False, whitens=False)
def grpo_passk(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: list[str],
    grpo_norm_by_std: bool = True,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute pass@k advantages: the best of a group gets A = (its score - the second best) / (std_group + 1e-6), the
    others 0.

    The group is the k samples, its value is its best score, and A is the part of it that the best one adds. A tie for
    the best adds nothing, and neither does a group of one. `grpo_norm_by_std=false` leaves the division out.

    Source: Optimizing Language Models for Inference Time Objectives using Reinforcement Learning (Tang et al., 2025,
    arXiv:2503.19595).
    """
    scores = trajectory_scores(token_level_rewards, response_mask)  # (B,)
    groups = prompt_groups(index, scores.device)
    _mean, std, _size = groups.statistics(scores)
    best = groups.highest(scores)
    is_best = scores == best
    is_alone = groups.total(is_best.to(scores.dtype)) == 1
    second = groups.highest(torch.where(is_best, -torch.inf, scores))  # of the others
    advantages = torch.where(is_best & is_alone & (std > 0) & ~are_equal(best, second), best - second, 0.0)
    if grpo_norm_by_std:
        advantages = advantages / (std + 1e-6)
    return _same_for_every_token(advantages, response_mask)


def group_normalized(scores: torch.Tensor, index: list[str], by_std: bool = True) -> torch.Tensor:
    """Return scores (B,) less the mean of their group, divided by its std + 1e-6; a group of one keeps its score."""
    mean, std, size = group_statistics(scores, index)
    normalized = torch.where(std > 0, scores - mean, 0.0)
    if by_std:
        normalized = normalized / (std + 1e-6)
    return torch.where(size > 1, normalized, scores)


def _centred_scores(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores (B,) less the mean of their group, exactly 0 in a flat group or one of one, and its size (B,)."""
    scores = trajectory_scores(token_level_rewards, response_mask)
    mean, std, size = group_statistics(scores, index)
    return torch.where(std > 0, scores - mean, 0.0), size


def _same_for_every_token(advantages: torch.Tensor, response_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages (B,) as the advantages and returns of each sampled token, both (B, R)."""
    on_tokens = on_sampled_tokens(advantages, response_mask)
    return on_tokens, on_tokens
