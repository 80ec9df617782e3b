"""PPO's clipped surrogate of each token, and its variants."""

from __future__ import annotations

from skyrl_train.algorithms.losses.masking import LossOutput, Tokens, within_mask
from skyrl_train.algorithms.registry import register_policy_loss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.lazy import torch


@register_policy_loss("regular")
@within_mask
def clipped_surrogate(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute PPO's clipped surrogate: -min(ρA, clip(ρ, 1 - eps_clip_low, 1 + eps_clip_high) A) with ρ = π / π_old.

    All tensors (B, R). Metric `ppo_clip_ratio`: the fraction of tokens where the clip wins, which have no gradient.

    Source: Proximal Policy Optimization (Schulman et al., 2017, arXiv:1707.06347), equation 7; a separate upper bound,
    DAPO (Yu et al., 2025, arXiv:2503.14476).
    """
    loss, is_clipped = pessimistic_surrogate(tokens.ratio, tokens.advantages, config)
    return loss, {"ppo_clip_ratio": is_clipped.to(loss.dtype)}


@register_policy_loss("dual_clip")
@within_mask
def dual_clip(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute the clipped surrogate, bounded by -A · clip_ratio_c where A < 0 (PPO leaves ρ unbounded there).

    With clip_ratio_c > 1 + eps_clip_high this is the two-sided clip, -min(min(ρ, δ) A, clip(ρ) A) for δ = clip_ratio_c.
    All tensors (B, R). Metrics: `ppo_clip_ratio` as in `regular`; `dual_clip_ratio`, the fraction of tokens at the
    bound.

    Source: Mastering Complex Control in MOBA Games (Ye et al., 2019, arXiv:1912.09729); as the two-sided
    clip, INTELLECT-2 (Prime Intellect Team, 2025, arXiv:2505.07291), section 4.1.
    """
    loss, is_clipped = pessimistic_surrogate(tokens.ratio, tokens.advantages, config)
    bound = -config.clip_ratio_c * tokens.advantages
    is_bounded = (tokens.advantages < 0) & (loss > bound)
    return torch.where(is_bounded, bound, loss), {
        "ppo_clip_ratio": is_clipped.to(loss.dtype),
        "dual_clip_ratio": is_bounded.to(loss.dtype),
    }


def pessimistic_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -min(ρA, clip(ρ) A) and where the clip wins, both (B, R); `ratio` is (B, R) or (B, 1)."""
    surrogate = -ratio * advantages
    clipped = -ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high) * advantages
    return torch.maximum(surrogate, clipped), clipped > surrogate
