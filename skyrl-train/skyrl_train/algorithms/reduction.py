"""From a loss per token to one number, with a divisor that belongs to the whole mini-batch.

The weights are computed once, before the mini-batch is split; every part then only sums `weights * loss`. So the
result does not depend on how many micro-batches or ranks share the work.
"""

from __future__ import annotations

from typing import Literal

import torch

LossReduction = Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm"]


def token_weights(loss_mask: torch.Tensor, reduction: LossReduction, max_seq_len: int | None = None) -> torch.Tensor:
    """The weight (B, R) of each token's loss in the loss of a mini-batch; zero outside the mask.

    token_mean: every token counts the same, 1 / number of tokens. sequence_mean: every trajectory counts the same,
    1 / (B · its tokens). seq_mean_token_sum_norm: 1 / (B · max_seq_len), so that a long trajectory counts more than
    a short one but never depends on the others (Dr. GRPO, arXiv:2503.20783).
    """
    n_rows = loss_mask.shape[0]
    if reduction == "token_mean":
        return loss_mask / loss_mask.sum().clamp(min=1)
    if reduction == "sequence_mean":
        return loss_mask / (n_rows * loss_mask.sum(dim=-1, keepdim=True).clamp(min=1))
    assert max_seq_len is not None, "seq_mean_token_sum_norm needs max_seq_len; the config check guarantees it"
    return loss_mask / (n_rows * max_seq_len)


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σ weights · values over (B, R). A NaN where the weight is 0 stays there."""
    return (torch.where(weights > 0, values, 0.0) * weights).sum()
