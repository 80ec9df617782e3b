"""PPO's clipped losses per token: the surrogate with its variants, and the critic's loss."""

from __future__ import annotations

from skyrl_train.algorithms.losses.masking import LossOutput, Tokens, within_mask
from skyrl_train.algorithms.registry import register_policy_loss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.lazy import torch


@register_policy_loss("regular")
@within_mask
def clipped_surrogate(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute PPO's clipped surrogate: -min(ρA, clip(ρ, 1 - eps_clip_low, 1 + eps_clip_high) A) with ρ = π / π_old.

    All tensors (B, R). Metric `ppo_clip_ratio`: the fraction of tokens where the clip wins and the gradient is 0.

    Two tokens have become 1.5 times as likely. The clip at 1.2 stops the good one, but lets the bad one be corrected:

    >>> advantages, ratio = torch.tensor([[1.0, -1.0]]), torch.tensor([[1.5, 1.5]])
    >>> loss, metrics = clipped_surrogate(ratio.log(), torch.zeros(1, 2), advantages, AlgorithmConfig())
    >>> loss, metrics["ppo_clip_ratio"]
    (tensor([[-1.2000,  1.5000]]), tensor([[1., 0.]]))

    Sources: Proximal Policy Optimization (Schulman et al., 2017, arXiv:1707.06347), equation 7. The separate upper
    bound is from DAPO (Yu et al., 2025, arXiv:2503.14476).
    """
    loss, is_clipped = pessimistic_surrogate(tokens.ratio, tokens.advantages, config)
    return loss, {"ppo_clip_ratio": is_clipped.to(loss.dtype)}


@register_policy_loss("dual_clip")
@within_mask
def dual_clip(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute the clipped surrogate, bounded by -A · clip_ratio_c where A < 0 (PPO leaves ρ unbounded there).

    With clip_ratio_c > 1 + eps_clip_high this is the two-sided clip, -min(min(ρ, δ) A, clip(ρ) A) for δ = clip_ratio_c.
    All tensors (B, R). Metrics: `ppo_clip_ratio` as in `regular`, and `dual_clip_ratio`, the fraction of tokens at the
    bound.

    A bad token has become 20 times as likely. PPO's loss would be 20, so one such token could dominate the update:

    >>> loss, _ = dual_clip(torch.tensor([[20.0]]).log(), torch.zeros(1, 1), -torch.ones(1, 1), AlgorithmConfig())
    >>> loss  # -A · clip_ratio_c
    tensor([[3.]])

    Sources: Mastering Complex Control in MOBA Games (Ye et al., 2019, arXiv:1912.09729). The two-sided clip is from
    INTELLECT-2 (Prime Intellect Team, 2025, arXiv:2505.07291), section 4.1.
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
    """Return -min(ρA, clip(ρ) A) and a mask of where the clip wins, both (B, R). `ratio` ρ is (B, R) or (B, 1)."""
    surrogate = -ratio * advantages
    clipped = -ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high) * advantages
    return torch.maximum(surrogate, clipped), clipped > surrogate


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float | None
) -> LossOutput:
    """Return ½ max((V - G)², (clip(V, V_old ± value_clip) - G)²) per token, for returns G. None disables clipping.

    All tensors (B, R). Only `values` has a gradient, and only where the clip does not win. Metric `values_clipfrac`:
    the fraction of tokens where it does.

    The value moved from 0 to 1, past the clip at 0.5. The loss pulls it back to a return of 0, but no further up to 2:

    >>> values, old, returns = torch.tensor([[1.0, 1.0]]), torch.zeros(1, 2), torch.tensor([[0.0, 2.0]])
    >>> value_loss(values, old, returns, value_clip=0.5)
    (tensor([[0.5000, 1.1250]]), {'values_clipfrac': tensor([[0., 1.]])})

    Source: PPO's value clip, as described in Implementation Matters in Deep Policy Gradients (Engstrom et al., 2020,
    arXiv:2005.12729).
    """
    error = (values - returns.detach()).square()
    if value_clip is None:
        return error / 2, {"values_clipfrac": torch.zeros_like(error)}
    old_values = old_values.detach()
    clipped = values.clamp(old_values - value_clip, old_values + value_clip)
    clipped_error = (clipped - returns.detach()).square()
    return torch.maximum(error, clipped_error) / 2, {"values_clipfrac": (clipped_error > error).to(values.dtype)}
