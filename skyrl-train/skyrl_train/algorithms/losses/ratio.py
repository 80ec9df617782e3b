"""How much likelier the policy makes what was sampled: per token and per trajectory."""

from __future__ import annotations

import torch

from skyrl_train.algorithms.masked import masked_mean


def importance_ratio(log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor) -> torch.Tensor:
    """π / μ per token (B, R); the exponent is held within ±20 so that no ratio overflows."""
    return (log_probs - behaviour_log_probs).clamp(-20, 20).exp()


def sequence_ratio(log_ratio: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """The geometric mean (B, 1) of the ratios of a trajectory's trained tokens, from their logarithms (B, R).

    1 for a row without a trained token; the exponent is held below 10 so that no ratio overflows.

    Source: GSPO (Zheng et al., 2025, arXiv:2507.18071), section 4.1.
    """
    return bounded_exp(masked_mean(log_ratio, loss_mask, dim=-1)[:, None])


def bounded_exp(mean_log_ratio: torch.Tensor) -> torch.Tensor:
    """e^min(x, 10): of a mean over a whole trajectory, nothing larger is a number to learn from."""
    return mean_log_ratio.clamp(max=10).exp()
