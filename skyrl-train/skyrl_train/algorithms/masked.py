"""Statistics and selections of values within a mask. Values outside have no effect, even if they are NaN."""

from __future__ import annotations

import math

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

    The variance is unbiased. A single value becomes 0.

    >>> masked_whiten(torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([1, 1, 1, 0]))
    tensor([-1.,  0.,  1.,  0.])
    """
    centred = values - masked_mean(values, mask)
    centred = centred - masked_mean(centred, mask)  # the first mean is rounded, and 1 / √1e-8 would magnify that
    return torch.where(mask > 0, centred * (masked_var(centred, mask) + 1e-8).rsqrt(), 0.0)


def normalize_over_batch(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Apply `advantage_batch_normalize`: (A - mean) / √max(variance, 1e-8) over the masked tokens (B, R), 0 outside.

    Unlike `masked_whiten`, it uses the biased variance.
    """
    centred = advantages - masked_mean(advantages, mask)
    variance = masked_mean(centred.square(), mask)
    return torch.where(mask > 0, centred * variance.clamp(min=1e-8).rsqrt(), 0.0)


def top_entropy_mask(entropies: torch.Tensor, loss_mask: torch.Tensor, quantile: float) -> torch.Tensor:
    """Return 1 (B, R) on the share `quantile` of a mini-batch's trained tokens with the highest entropy, else 0.

    These are the few tokens where the policy could continue in several ways. At least one token is kept, as are ties
    with the lowest kept entropy. Call it on the whole mini-batch, because a part would have a different threshold.

    >>> entropies = torch.tensor([[0.1, 2.0, 0.3], [0.2, 1.5, 9.0]])
    >>> loss_mask = torch.tensor([[1, 1, 1], [1, 1, 0]])  # the 9.0 is not trained
    >>> top_entropy_mask(entropies, loss_mask, quantile=0.4)  # 2 of 5 tokens
    tensor([[0., 1., 0.],
            [0., 1., 0.]])

    Source: Beyond the 80/20 Rule (Wang et al., 2025, arXiv:2506.01939). It keeps 0.2.
    """
    is_trained = loss_mask > 0
    trained = entropies[is_trained]  # (N,)
    if not len(trained):
        return torch.zeros_like(entropies)
    n_kept = math.ceil(quantile * len(trained) * (1 - 1e-9))  # in floats 7 / 25 · 25 is slightly above 7
    threshold = trained.topk(n_kept).values[-1]
    return (is_trained & (entropies >= threshold)).to(entropies.dtype)
