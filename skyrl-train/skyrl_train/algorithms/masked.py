"""Statistics of what a mask marks. What lies outside is never read, so that a NaN there stays there."""

from __future__ import annotations

import torch


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The mean of the values where `mask` is positive, of everything or along `dim`; 0 where nothing is marked."""
    is_marked = mask > 0
    total = torch.where(is_marked, values, 0.0).sum(dim=dim)
    return total / is_marked.sum(dim=dim).clamp(min=1)


def masked_var(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The unbiased variance of the values where `mask` is positive; 0 where fewer than two are marked."""
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
