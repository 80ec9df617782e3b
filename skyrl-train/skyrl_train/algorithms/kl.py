"""Estimates of KL(policy || reference) from the log-probs of sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch

KLEstimator = Literal["k1", "k2", "k3", "abs"]


def approximate_kl(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """The KL estimate of each token (B, R), differentiable in `log_probs`.

    With d = ref - policy: k1 = -d (unbiased, can be negative), abs = |d|, k2 = d²/2, k3 = e^d - d - 1 (unbiased and
    never negative; d is held within ±20 and k3 below 10).

    Source: Approximating KL Divergence (Schulman, 2020, http://joschu.net/blog/kl-approx.html).
    """
    d = ref_log_probs - log_probs
    if estimator == "k1":
        return -d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return d.square() / 2
    d = d.clamp(-20, 20)
    return (d.exp() - d - 1).clamp(max=10)
