"""Trajectories of several rows: one advantage for all of them."""

from __future__ import annotations

import torch

from skyrl_train.algorithms.masked import masked_mean


def of_all_rows(
    values: torch.Tensor, mask: torch.Tensor, is_last_row: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    """What was computed for the last rows, `values` (T, R) on `mask` (T, R), on the trained tokens (B, R) of all rows.

    `is_last_row` (B,) ends each trajectory's rows; `loss_mask` is (B, R). A row gets the mean over its trajectory's
    last row, which is the value itself where all tokens of a trajectory have the same.
    """
    per_trajectory = masked_mean(values, mask, dim=-1)  # (T,)
    trajectory_of_row = is_last_row.long().cumsum(0) - is_last_row.long()  # (B,)
    return torch.where(loss_mask > 0, per_trajectory[trajectory_of_row][:, None], 0.0)
