"""The critic's loss."""

from __future__ import annotations

from skyrl_train.algorithms.losses.masking import LossOutput
from skyrl_train.lazy import torch


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float | None
) -> LossOutput:
    """Return ½ max((V - G)², (clip(V, V_old ± value_clip) - G)²) per token, for returns G. None disables clipping.

    All tensors (B, R). Only `values` has a gradient, and only where the clip does not win. Metric `values_clipfrac`:
    the fraction of tokens where it does.

    The value moved from 0 to 1, past the clip at 0.5. Moving it further from a return of 0 counts, towards 2 does not:

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
