"""Which tokens are forks in the road: what the entropy of the policy says about them."""

from __future__ import annotations

import math

import torch


def top_entropy_mask(entropies: torch.Tensor, loss_mask: torch.Tensor, quantile: float) -> torch.Tensor:
    """1 on the share `quantile` of a mini-batch's trained tokens that have the highest entropy, 0 elsewhere; (B, R).

    Few tokens are forks in the road, where the policy could go on in several ways; they are the ones worth learning.
    At least one token is kept, and those that tie with the last one kept are kept too. Call it on the whole mini-batch:
    a part of it has another threshold.

    Source: Beyond the 80/20 Rule (Wang et al., 2025, arXiv:2506.01939), which keeps 0.2.
    """
    is_trained = loss_mask > 0
    trained = entropies[is_trained]  # (N,)
    if not len(trained):
        return torch.zeros_like(entropies)
    n_kept = math.ceil(quantile * len(trained) * (1 - 1e-9))  # floats have 7 / 25 · 25 a little above 7
    threshold = trained.topk(n_kept).values[-1]
    return (is_trained & (entropies >= threshold)).to(entropies.dtype)
