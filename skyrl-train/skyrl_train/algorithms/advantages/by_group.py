"""Estimators that compare a trajectory with its group and give all its tokens the same advantage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.algorithms.advantages.groups import (
    ROUNDING,
    Estimate,
    are_equal,
    group_statistics,
    on_sampled_tokens,
    prompt_groups,
    trajectory_scores,
)
from skyrl_train.algorithms.masked import masked_whiten
from skyrl_train.algorithms.registry import register_advantage_estimator
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError
from skyrl_train.lazy import torch


@register_advantage_estimator("grpo", compares="samples", per_token=False, whitens=False)
def grpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: list[str],
    grpo_norm_by_std: bool = True,
    **_: Any,
) -> Estimate:
    """Compute group-relative advantages: A = (S - mean_group(S)) / (std_group(S) + 1e-6), the same for every token.

    S is the sum of a trajectory's rewards, and std is unbiased. `grpo_norm_by_std=false` omits the division. A group of
    one has no baseline, so its advantage is S. A group of equal rewards gets exactly 0, although the formula alone
    would divide the rounding of their sums by 1e-6.

    Four samples of one prompt. Only the first is right, and the second has only one token:

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    >>> mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    >>> grpo(rewards, mask, index=["a"] * 4)[0]
    tensor([[ 1.5000,  1.5000],
            [-0.5000,  0.0000],
            [-0.5000, -0.5000],
            [-0.5000, -0.5000]])

    Sources: DeepSeekMath (Shao et al., 2024, arXiv:2402.03300), section 4.1. Without the division, Dr. GRPO (Liu et
    al., 2025, arXiv:2503.20783).
    """
    scores = trajectory_scores(token_level_rewards, response_mask)  # (B,)
    return _same_for_every_token(group_normalized(scores, index, grpo_norm_by_std), response_mask)


@register_advantage_estimator("rloo", compares="samples", per_token=False, whitens=False)
def rloo(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], **_: Any) -> Estimate:
    """Compute REINFORCE leave-one-out advantages: A = S - the mean score of the rest of the group.

    S is the sum of a trajectory's rewards. For a group of n, A = (S - mean_group(S)) · n / (n - 1). A group of one gets
    0.

    >>> rewards = torch.tensor([[1.0], [0.0], [0.5]])
    >>> rloo(rewards, torch.ones(3, 1), index=["a"] * 3)[0].squeeze()  # the first: 1 - (0 + 0.5) / 2
    tensor([ 0.7500, -0.7500,  0.0000])

    Sources: Buy 4 REINFORCE Samples, Get a Baseline for Free! (Kool et al., 2019). Back to Basics (Ahmadian et al.,
    2024, arXiv:2402.14740).
    """
    centred, size = _centred_scores(token_level_rewards, response_mask, index)
    return _same_for_every_token(centred * size / (size - 1).clamp(min=1), response_mask)


@register_advantage_estimator("reinforce++-baseline", compares="samples", per_token=False, whitens=True)
def reinforce_plus_plus_baseline(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], **_: Any
) -> Estimate:
    """Compute REINFORCE++ advantages with a group baseline: A = whiten(S - mean_group(S)) over the sampled tokens.

    S is the sum of a trajectory's rewards. Whitening runs over the tokens of the batch, so long trajectories count more
    and the mean it subtracts is rarely 0. A group of equal rewards is therefore not exactly 0, unless all groups are
    such groups.

    Source: REINFORCE++ (Hu et al., 2025, arXiv:2501.03262), the variant with baseline.
    """
    centred, _size = _centred_scores(token_level_rewards, response_mask, index)
    advantages = masked_whiten(on_sampled_tokens(centred, response_mask), response_mask)
    return advantages, advantages


@register_advantage_estimator("opo", compares="samples", per_token=False, whitens=False)
def opo(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], **_: Any) -> Estimate:
    """Subtract the optimal reward baseline: A = S - Σ_group l·S / Σ_group l, where l counts a trajectory's tokens.

    The baseline with the least variance weights each score by its squared gradient norm. This norm grows with the
    length, so the number of sampled tokens approximates it. A trajectory whose mask is all 0 has weight 0. A group of
    one, or of equal rewards, gets exactly 0.

    Source: On-Policy RL with Optimal Reward Baseline (Hao et al., 2025, arXiv:2505.23585).
    """
    scores = trajectory_scores(token_level_rewards, response_mask)  # (B,)
    lengths = (response_mask > 0).sum(dim=-1).to(scores.dtype)  # (B,)
    groups = prompt_groups(index, scores.device)
    _mean, std, _size = groups.statistics(scores)
    advantages = torch.where(std > 0, scores - groups.weighted_mean(scores, lengths), 0.0)
    return _same_for_every_token(advantages, response_mask)


@register_advantage_estimator("gpg", compares="samples", per_token=False, whitens=False)
def gpg(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], **_: Any) -> Estimate:
    """Compute group policy gradient advantages: A = α · (S - mean_group(S)).

    α = trajectories / trajectories with a score other than 0, counted over the batch and over trajectories with sampled
    tokens. It compensates for trajectories that earned nothing, so it expects failures to earn 0. If they earn -1, α is
    always 1. The paper's α omits groups of equal rewards, but this is the variant in common use.

    Source: GPG (Chu et al., 2025, arXiv:2504.02546). Its loss is `policy_loss_type=policy_gradient`.
    """
    scores = trajectory_scores(token_level_rewards, response_mask)  # (B,)
    mean, std, _size = group_statistics(scores, index)
    is_trained = (response_mask > 0).any(dim=-1)  # (B,)
    n_scored = (is_trained & (scores.abs() > ROUNDING)).sum()
    alpha = is_trained.sum().to(scores.dtype) / n_scored.clamp(min=1)
    return _same_for_every_token(torch.where(std > 0, (scores - mean) * alpha, 0.0), response_mask)


@register_advantage_estimator("maxrl", compares="samples", per_token=False, whitens=False)
def maxrl(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], **_: Any) -> Estimate:
    """Compute maximum-likelihood RL advantages: A = (S - mean_group(S)) / (mean_group(S) - floor + 1e-6).

    S is the sum of a trajectory's rewards, floor = min(0, min_group(S)). Without negative rewards the floor is 0, and
    this is the paper's estimator: with rewards of 0 and 1, a prompt that is solved with probability p has weight 1/p.
    With negative rewards, the mean in the paper's denominator may be near 0 or below. So scores count from the floor,
    and rewards of ±1 give the same advantages as 0 and 1. In a group of n, they are within [-1, n - 1].

    >>> rewards = torch.tensor([[1.0], [0.0], [0.0], [0.0]])  # solved by one in four
    >>> maxrl(rewards, torch.ones(4, 1), index=["a"] * 4)[0].squeeze().round(decimals=2)
    tensor([ 3., -1., -1., -1.])

    A group of equal rewards gets exactly 0. A group of one keeps its score, as in GRPO.

    Source: Maximum Likelihood Reinforcement Learning (Tajwar et al., 2026, arXiv:2602.02710).
    """
    scores = trajectory_scores(token_level_rewards, response_mask)  # (B,)
    groups = prompt_groups(index, scores.device)
    mean, std, size = groups.statistics(scores)
    floor = groups.extreme(scores, "amin").clamp(max=0)
    advantages = torch.where(std > 0, (scores - mean) / (mean - floor + 1e-6), 0.0)
    return _same_for_every_token(torch.where(size > 1, advantages, scores), response_mask)


@register_advantage_estimator("grpo_passk", compares="samples", per_token=False, whitens=False)
def grpo_passk(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: list[str],
    grpo_norm_by_std: bool = True,
    **_: Any,
) -> Estimate:
    """Compute pass@k advantages: only a group's best trajectory gets one, (best - second best) / (std_group + 1e-6).

    pass@k values k samples by their best score, so the advantage is what the best sample adds to that value. A tie for
    the best gets 0, as does a group of one. `grpo_norm_by_std=false` omits the division.

    >>> rewards = torch.tensor([[1.0], [0.4], [0.0]])
    >>> grpo_passk(rewards, torch.ones(3, 1), index=["a"] * 3, grpo_norm_by_std=False)[0].squeeze()
    tensor([0.6000, 0.0000, 0.0000])

    Source: Optimizing Language Models for Inference Time Objectives using Reinforcement Learning (Tang et al., 2025,
    arXiv:2503.19595).
    """
    scores = trajectory_scores(token_level_rewards, response_mask)  # (B,)
    groups = prompt_groups(index, scores.device)
    _mean, std, _size = groups.statistics(scores)
    best = groups.extreme(scores, "amax")
    is_best = scores == best
    is_alone = groups.total(is_best.to(scores.dtype)) == 1
    second = groups.extreme(torch.where(is_best, -torch.inf, scores), "amax")  # (B,) -inf in a group of one
    advantages = torch.where(is_best & is_alone & (std > 0) & ~are_equal(best, second), best - second, 0.0)
    if grpo_norm_by_std:
        advantages = advantages / (std + 1e-6)
    return _same_for_every_token(advantages, response_mask)


@register_advantage_estimator("gdpo", compares="parts", per_token=False, whitens=True)
def gdpo(
    response_mask: torch.Tensor,
    index: list[str],
    reward_components: Mapping[str, torch.Tensor],
    config: AlgorithmConfig,
    **_: Any,
) -> Estimate:
    """Compute group reward-decoupled advantages: normalize each component in its group, add them up, whiten the sum.

    A = whiten(Σ_c w_c · (S_c - mean_group(S_c)) / (std_group(S_c) + 1e-6)), where S_c (B,) is a trajectory's total for
    component c and w_c its weight in `gdpo.weights`, by default 1. GRPO on the sum could not distinguish trajectories
    that earned the same sum in different ways, and a component with a large spread would hide one with a small spread.
    Whitening over the batch's sampled tokens keeps the size of advantages independent of the number of components.
    `token_level_rewards` is ignored.

    Source: GDPO (Liu et al., 2026, arXiv:2601.05242).

    Raises:
        ConfigError: there are no components, or `gdpo.weights` lists an unknown one.
    """
    weights = config.gdpo.weights
    if not reward_components:
        raise ConfigError(
            "trainer.algorithm.advantage_estimator=gdpo needs reward components, but no environment reports "
            'any; return metadata={"reward_components": {name: reward}} from step()'
        )
    if unknown := sorted(set(weights) - set(reward_components)):
        raise ConfigError(
            f"trainer.algorithm.gdpo.weights names {', '.join(unknown)}, which no environment reports; "
            f"the components are: {', '.join(sorted(reward_components))}"
        )
    # In double precision, because whitening magnifies the rounding of components that cancel.
    parts = [
        weights.get(name, 1.0) * group_normalized(scores.double(), index) for name, scores in reward_components.items()
    ]
    total = torch.stack(parts).sum(dim=0)  # (B,)
    advantages = masked_whiten(on_sampled_tokens(total, response_mask), response_mask)  # (B, R)
    advantages = advantages.to(next(iter(reward_components.values())).dtype)
    return advantages, advantages


def group_normalized(scores: torch.Tensor, index: list[str], by_std: bool = True) -> torch.Tensor:
    """Return (scores - group mean) / (group std + 1e-6), all (B,). A group of one keeps its score."""
    mean, std, size = group_statistics(scores, index)
    normalized = torch.where(std > 0, scores - mean, 0.0)
    if by_std:
        normalized = normalized / (std + 1e-6)
    return torch.where(size > 1, normalized, scores)


def _centred_scores(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores (B,) minus their group's mean, exactly 0 if the group is flat or has one row, and its size (B,)."""
    scores = trajectory_scores(token_level_rewards, response_mask)
    mean, std, size = group_statistics(scores, index)
    return torch.where(std > 0, scores - mean, 0.0), size


def _same_for_every_token(advantages: torch.Tensor, response_mask: torch.Tensor) -> Estimate:
    """Repeat advantages (B,) on every sampled token (B, R), and return them as advantages and as returns."""
    on_tokens = on_sampled_tokens(advantages, response_mask)
    return on_tokens, on_tokens
