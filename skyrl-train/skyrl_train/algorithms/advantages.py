"""Advantage estimators: rewards (B, R) in, advantages and returns (B, R) out."""

from __future__ import annotations

from typing import Any

import torch

from skyrl_train.algorithms.registry import register_advantage_estimator
from skyrl_train.config.algorithm import AlgorithmConfig


@register_advantage_estimator("grpo")
def grpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: list[str],
    config: AlgorithmConfig,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantages: A = (S - mean_group(S)) / (std_group(S) + 1e-6), the same for every token.

    S is the sum of a trajectory's rewards, std the unbiased one; `grpo_norm_by_std=false` leaves the division
    out. A group of one has no baseline: its advantage is S itself. A group of equal rewards gets exactly 0; the
    formula alone would divide the rounding of their sums by 1e-6.

    Source: DeepSeekMath (Shao et al., 2024, arXiv:2402.03300), section 4.1; without the division, Dr. GRPO
    (Liu et al., 2025, arXiv:2503.20783).
    """
    scores = token_level_rewards.sum(dim=-1)  # (B,)
    mean, std, size = group_statistics(scores, index)  # (B,) each
    advantages = torch.where(std > 0, scores - mean, 0.0)
    if config.grpo_norm_by_std:
        advantages = advantages / (std + 1e-6)
    advantages = torch.where(size > 1, advantages, scores)
    advantages = advantages[:, None] * response_mask  # (B, R)
    return advantages, advantages


def group_statistics(scores: torch.Tensor, index: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, unbiased standard deviation and size of the group each row belongs to, all (B,).

    Groups are the rows with equal `index`, wherever they stand. A group of one, or of scores that differ by no more
    than the rounding of a sum (1e-6, relative above 1), has std exactly 0.
    """
    groups: dict[str, int] = {}
    group_of_row = torch.tensor([groups.setdefault(uid, len(groups)) for uid in index], device=scores.device)
    zeros = scores.new_zeros(len(groups))
    size = zeros.index_add(0, group_of_row, torch.ones_like(scores))
    mean = zeros.index_add(0, group_of_row, scores) / size
    squares = zeros.index_add(0, group_of_row, (scores - mean[group_of_row]).square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    lowest = zeros.scatter_reduce(0, group_of_row, scores, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, group_of_row, scores, "amax", include_self=False)
    is_flat = highest - lowest <= 1e-6 * highest.abs().clamp(min=1)
    std = torch.where(is_flat, 0.0, std)
    return mean[group_of_row], std[group_of_row], size[group_of_row]
