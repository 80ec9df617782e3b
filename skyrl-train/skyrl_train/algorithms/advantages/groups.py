"""Groups of values to compare: a prompt's trajectories, or their turns or tokens at the same index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from skyrl_train.lazy import torch

Estimate: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""Advantages and returns, both (B, R) and 0 outside the mask."""

ROUNDING = 1e-6  # values that differ by no more than a sum's rounding count as equal (relative above 1)


@dataclass(frozen=True, slots=True)
class Cells:
    """N values sorted into cells, to compare only values of the same cell.

    Every method takes values (N,) and returns, for each value, a statistic of its cell (N,).

    >>> Cells(torch.tensor([0, 0, 1]), n_cells=2).total(torch.tensor([1.0, 2.0, 5.0]))
    tensor([3., 3., 5.])
    """

    cell: torch.Tensor  # (N,) index of each value's cell
    n_cells: int

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the cell."""
        return values.new_zeros(self.n_cells).index_add(0, self.cell, values)[self.cell]

    def extreme(self, values: torch.Tensor, which: Literal["amin", "amax"]) -> torch.Tensor:
        """Return the smallest or the largest value in the cell."""
        zeros = values.new_zeros(self.n_cells)
        return zeros.scatter_reduce(0, self.cell, values, which, include_self=False)[self.cell]

    def statistics(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return mean, unbiased standard deviation and size of the cell.

        A cell of one value, or of values that differ by no more than rounding, has standard deviation exactly 0.
        """
        size = self.total(torch.ones_like(values))
        mean = self.total(values) / size
        std = (self.total((values - mean).square()) / (size - 1).clamp(min=1)).sqrt()
        is_flat = are_equal(self.extreme(values, "amax"), self.extreme(values, "amin"))
        return mean, torch.where(is_flat, 0.0, std), size

    def weighted_mean(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the mean of the cell with non-negative weights, or 0 if all weights are 0."""
        total_weight = self.total(weights)
        return self.total(values * weights) / torch.where(total_weight > 0, total_weight, 1.0)


def prompt_groups(index: list[str], device: torch.device) -> Cells:
    """Group the B rows with equal `index`, adjacent or not."""
    groups: dict[str, int] = {}
    group_of_row = [groups.setdefault(uid, len(groups)) for uid in index]
    return Cells(torch.tensor(group_of_row, dtype=torch.long, device=device), len(groups))


def group_statistics(scores: torch.Tensor, index: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, unbiased standard deviation and size of each row's group, all (B,).

    Groups are the rows with equal `index`. If a group has one row, or scores that differ by no more than a sum's
    rounding (1e-6, relative above 1), its std is exactly 0.

    >>> group_statistics(torch.tensor([1.0, 0.0, 5.0]), index=["a", "a", "b"])
    (tensor([0.5000, 0.5000, 5.0000]), tensor([0.7071, 0.7071, 0.0000]), tensor([2., 2., 1.]))
    """
    return prompt_groups(index, scores.device).statistics(scores)


def are_equal(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return True where `high` >= `low` exceeds it by no more than rounding."""
    return high - low <= ROUNDING * high.abs().clamp(min=1)


def trajectory_scores(token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return the total reward of each trajectory (B,), summed over all its tokens (B, R), sampled or not.

    So a trajectory that is filtered out (its mask is all 0) still counts in its group. A NaN outside the mask counts as
    0.
    """
    is_padding = token_level_rewards.isnan() & (response_mask <= 0)
    return torch.where(is_padding, 0.0, token_level_rewards).sum(dim=-1)


def on_sampled_tokens(values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return values of trajectories (B,) or of tokens (B, R) as (B, R), exactly 0 outside the mask."""
    return torch.where(response_mask > 0, values[:, None] if values.dim() == 1 else values, 0.0)
