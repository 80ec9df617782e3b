"""Statistics of the values within a mask. Values outside are never read, so a NaN there has no effect."""

from __future__ import annotations

from skyrl_train.lazy import torch


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the mean over all values, or along `dim`, where `mask` is positive. The mean of no values is 0.

    >>> masked_mean(torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([1, 1, 0]))
    tensor(2.)
    """
    is_marked = mask > 0
    total = torch.where(is_marked, values, 0.0).sum(dim=dim)
    return total / is_marked.sum(dim=dim).clamp(min=1)


def masked_var(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the unbiased variance of the values where `mask` is positive, or 0 for fewer than two values."""
    is_marked = mask > 0
    squares = torch.where(is_marked, values - masked_mean(values, mask), 0.0).square()
    return squares.sum() / (is_marked.sum() - 1).clamp(min=1)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Shift and scale the marked values to mean 0 and variance 1: (x - mean) / √(var + 1e-8), and 0 outside the mask.

    The variance is the unbiased one. A single value becomes 0.

    >>> masked_whiten(torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([1, 1, 1, 0]))
    tensor([-1.,  0.,  1.,  0.])
    """
    centred = values - masked_mean(values, mask)
    centred = centred - masked_mean(centred, mask)  # the first mean is rounded, and 1 / √1e-8 would magnify that
    return torch.where(mask > 0, centred * (masked_var(centred, mask) + 1e-8).rsqrt(), 0.0)


def normalize_over_batch(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Apply `advantage_batch_normalize`: (A - mean) / √max(variance, 1e-8) over the masked tokens (B, R), 0 outside.

    Unlike `masked_whiten`, it takes the biased variance.
    """
    centred = advantages - masked_mean(advantages, mask)
    variance = masked_mean(centred.square(), mask)
    return torch.where(mask > 0, centred * variance.clamp(min=1e-8).rsqrt(), 0.0)
