"""Policy losses: one value per token (B, R), to be reduced with `reduction.token_weights`."""

from __future__ import annotations

import torch

from skyrl_train.algorithms.registry import register_policy_loss
from skyrl_train.config.algorithm import AlgorithmConfig


@register_policy_loss("regular")
def clipped_surrogate(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor,
    rollout_logprobs: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate: -min(ρA, clip(ρ, 1 - eps_clip_low, 1 + eps_clip_high) A) with ρ = π / π_old.

    Source: Proximal Policy Optimization (Schulman et al., 2017, arXiv:1707.06347), equation 7.
    """
    ratio = importance_ratio(log_probs, old_log_probs)  # (B, R)
    surrogate = -ratio * advantages
    clipped = -ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high) * advantages
    return torch.maximum(surrogate, clipped), {"ppo_clip_ratio": (clipped > surrogate).to(log_probs.dtype)}


def importance_ratio(log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor) -> torch.Tensor:
    """π / μ per token (B, R); the exponent is held within ±20 so that no ratio overflows."""
    return (log_probs - behaviour_log_probs).clamp(-20, 20).exp()
