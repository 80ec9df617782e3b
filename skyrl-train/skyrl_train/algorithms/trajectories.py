"""Rows of a batch joined into trajectories, as advantage estimators take them."""

from __future__ import annotations

from skyrl_train.lazy import torch
from skyrl_train.types import TrainingBatch


class TrajectoryView:
    """The T trajectories of a batch, each as one row of R' tokens.

    A trajectory whose history was rewritten has several rows. They are joined with one unmasked column in between, like
    an observation. So estimators count time, turns and tokens over the whole trajectory, and advantages do not depend
    on how it is divided into rows.
    """

    def __init__(self, batch: TrainingBatch) -> None:
        is_last = batch.is_last_row
        self.last_rows = is_last.nonzero()[:, 0]  # (T,) the last row of each trajectory
        self._is_trivial = bool(is_last.all())
        if self._is_trivial:
            return
        response = batch.attention_mask[:, -batch.response_length :]  # (B, R), ones first
        lengths = response.sum(dim=1)  # (B,)
        trajectory = is_last.long().cumsum(0) - is_last.long()  # (B,) of each row, from 0
        ends = (lengths + 1).cumsum(0)
        starts = ends - (lengths + 1)
        first_rows = torch.cat([torch.zeros(1, dtype=torch.long), self.last_rows[:-1] + 1])
        offsets = starts - starts[first_rows][trajectory]  # (B,) columns of the trajectory's earlier rows
        self._width = int((offsets + lengths).max())
        columns = offsets[:, None] + torch.arange(batch.response_length)
        self._is_token = response > 0  # (B, R)
        self._index = (trajectory[:, None] * self._width + columns)[self._is_token]  # (N,)

    def __len__(self) -> int:
        return len(self.last_rows)

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of rows (B, R) as values of trajectories (T, R'), 0 in between and behind."""
        if self._is_trivial:
            return values
        joined = values.new_zeros(len(self) * self._width)
        joined[self._index] = values[self._is_token]
        return joined.view(len(self), self._width)

    def divide(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of trajectories (T, R') as values of rows (B, R); the inverse of `join`."""
        if self._is_trivial:
            return values
        divided = values.new_zeros(self._is_token.shape)
        divided[self._is_token] = values.reshape(-1)[self._index]
        return divided

    def of_last_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return values that all rows of a trajectory share, from (B,) to (T,)."""
        return values[self.last_rows]
