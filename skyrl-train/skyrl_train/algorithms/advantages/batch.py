"""What is done to the advantages of any estimator, over the whole batch."""

from __future__ import annotations

import torch

from skyrl_train.algorithms.masked import masked_mean


def normalize_over_batch(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`advantage_batch_normalize`: (A - mean) / √max(variance, 1e-8) over the masked tokens (B, R), 0 outside.

    The variance is the biased one: the mean square of what is left after centring.
    """
    centred = advantages - masked_mean(advantages, mask)
    variance = masked_mean(centred.square(), mask)
    return torch.where(mask > 0, centred * variance.clamp(min=1e-8).rsqrt(), 0.0)
