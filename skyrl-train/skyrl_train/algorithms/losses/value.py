"""The critic's loss."""

from __future__ import annotations

from skyrl_train.algorithms.losses.masking import LossOutput
from skyrl_train.lazy import torch


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float | None
) -> LossOutput:
    """Return ½ max((V - G)², (clip(V, V_old ± value_clip) - G)²) per token, with returns G; None never clips.

    All tensors (B, R); only `values` has a gradient, and none where the clip wins. Metric `values_clipfrac`: the share
    of such tokens.

    Source: the clip of the value in PPO, described in Implementation Matters in Deep Policy Gradients (Engstrom et al.,
    2020, arXiv:2005.12729).
    """
    error = (values - returns.detach()).square()
    if value_clip is None:
        return error / 2, {"values_clipfrac": torch.zeros_like(error)}
    old_values = old_values.detach()
    clipped = values.clamp(old_values - value_clip, old_values + value_clip)
    clipped_error = (clipped - returns.detach()).square()
    return torch.maximum(error, clipped_error) / 2, {"values_clipfrac": (clipped_error > error).to(values.dtype)}
