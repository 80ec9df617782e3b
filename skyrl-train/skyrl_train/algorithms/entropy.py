"""Select the tokens with the highest entropy."""

from __future__ import annotations

import math

from skyrl_train.lazy import torch


def top_entropy_mask(entropies: torch.Tensor, loss_mask: torch.Tensor, quantile: float) -> torch.Tensor:
    """Return 1 (B, R) on the share `quantile` of a mini-batch's trained tokens with the highest entropy, else 0.

    These are the few tokens where the policy could continue in several ways. At least one token is kept. Ties with
    the lowest kept entropy are also kept. Call it on the whole mini-batch: a part would have a different threshold.

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
