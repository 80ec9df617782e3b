"""Statistics of the values within a mask. Values outside are never read, so that a NaN there has no effect."""

from __future__ import annotations

from skyrl_train.lazy import torch


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the mean of the values where `mask` is positive, of all or along `dim`; 0 where none is."""
    is_marked = mask > 0
    total = torch.where(is_marked, values, 0.0).sum(dim=dim)
    return total / is_marked.sum(dim=dim).clamp(min=1)


def masked_var(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the unbiased variance of the values where `mask` is positive; 0 if fewer than two are."""
    is_marked = mask > 0
    squares = torch.where(is_marked, values - masked_mean(values, mask), 0.0).square()
    return squares.sum() / (is_marked.sum() - 1).clamp(min=1)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Shift and scale the marked values to mean 0 and variance 1: (x - mean) / √(var + 1e-8), and 0 outside the mask.

    The variance is the unbiased one. A single value is only centred, which makes it 0.
    """
    centred = values - masked_mean(values, mask)
    centred = centred - masked_mean(centred, mask)  # the rounding of the first mean, which 1 / √1e-8 would make visible
    return torch.where(mask > 0, centred * (masked_var(centred, mask) + 1e-8).rsqrt(), 0.0)


def normalize_over_batch(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (A - mean) / √max(variance, 1e-8) over the masked tokens (B, R), 0 outside: `advantage_batch_normalize`.

    Unlike in `masked_whiten`, the variance is the biased one.
    """
    centred = advantages - masked_mean(advantages, mask)
    variance = masked_mean(centred.square(), mask)
    return torch.where(mask > 0, centred * variance.clamp(min=1e-8).rsqrt(), 0.0)
