"""Join the rows of a batch into trajectories for advantage estimators."""

from __future__ import annotations

from skyrl_train.lazy import torch
from skyrl_train.types import TrainingBatch


class TrajectoryView:
    """The T trajectories of a batch, each as one row of R' tokens.

    A trajectory whose history was rewritten has several rows. They are joined with one unmasked column in between, like
    an observation. Estimators then count time, turns and tokens over the whole trajectory, and advantages do not depend
    on its division into rows. For example, responses `a b` and `c` of one trajectory are joined to `a b . c`.
    """

    def __init__(self, batch: TrainingBatch) -> None:
        is_last = batch.is_last_row
        self.last_rows = is_last.nonzero()[:, 0]  # (T,) the last row of each trajectory
        self._is_trivial = bool(is_last.all())
        if self._is_trivial:
            return
        response = batch.attention_mask[:, -batch.response_length :]  # (B, R), ones first
        lengths = response.sum(dim=1)  # (B,)
        trajectory = is_last.long().cumsum(0) - is_last.long()  # (B,) trajectory of each row, from 0
        ends = (lengths + 1).cumsum(0)  # (B,) with the column between rows
        starts = ends - (lengths + 1)
        first_rows = torch.cat([torch.zeros(1, dtype=torch.long), self.last_rows[:-1] + 1])
        offsets = starts - starts[first_rows][trajectory]  # (B,) columns of the trajectory's earlier rows
        self._width = int((offsets + lengths).max())
        columns = offsets[:, None] + torch.arange(batch.response_length)
        self._is_token = response > 0  # (B, R)
        self._index = (trajectory[:, None] * self._width + columns)[self._is_token]  # (N,) in the flat (T, R')

    def __len__(self) -> int:
        return len(self.last_rows)

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of rows (B, R) as values of trajectories (T, R'), 0 between and after the rows."""
        if self._is_trivial:
            return values
        joined = values.new_zeros(len(self) * self._width)
        joined[self._index] = values[self._is_token]
        return joined.view(len(self), self._width)

    def divide(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of trajectories (T, R') as values of rows (B, R). It inverts `join` on the tokens."""
        if self._is_trivial:
            return values
        divided = values.new_zeros(self._is_token.shape)
        divided[self._is_token] = values.reshape(-1)[self._index]
        return divided

    def of_last_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return one value per trajectory (T,) from values (B,) that all its rows share."""
        return values[self.last_rows]
