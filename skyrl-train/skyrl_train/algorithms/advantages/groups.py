"""Groups of values that are compared: the trajectories of a prompt, or their turns or tokens of the same index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skyrl_train.lazy import torch

ROUNDING = 1e-6  # values that differ by no more than the rounding of a sum are equal; relative above 1


@dataclass(frozen=True, slots=True)
class Cells:
    """N values sorted into cells: only values of the same cell are compared.

    Every method takes values (N,) and returns a number for each of them, of its own cell (N,).
    """

    cell: torch.Tensor  # (N,) the number of each value's cell
    n_cells: int

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the cell."""
        return values.new_zeros(self.n_cells).index_add(0, self.cell, values)[self.cell]

    def highest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest value of the cell."""
        return self._extreme(values, "amax")

    def lowest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the smallest value of the cell."""
        return self._extreme(values, "amin")

    def statistics(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return mean, unbiased standard deviation and size of the cell.

        A cell of one value, or of values that differ by no more than rounding, has standard deviation exactly 0.
        """
        size = self.total(torch.ones_like(values))
        mean = self.total(values) / size
        std = (self.total((values - mean).square()) / (size - 1).clamp(min=1)).sqrt()
        is_flat = are_equal(self.highest(values), self.lowest(values))
        return mean, torch.where(is_flat, 0.0, std), size

    def weighted_mean(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the mean of the cell by non-negative weights; 0 if they are all 0."""
        total_weight = self.total(weights)
        return self.total(values * weights) / torch.where(total_weight > 0, total_weight, 1.0)

    def _extreme(self, values: torch.Tensor, which: Literal["amin", "amax"]) -> torch.Tensor:
        zeros = values.new_zeros(self.n_cells)
        return zeros.scatter_reduce(0, self.cell, values, which, include_self=False)[self.cell]


def prompt_groups(index: list[str], device: torch.device) -> Cells:
    """Return the groups of B rows: those with equal `index`, adjacent or not."""
    groups: dict[str, int] = {}
    group_of_row = [groups.setdefault(uid, len(groups)) for uid in index]
    return Cells(torch.tensor(group_of_row, dtype=torch.long, device=device), len(groups))


def group_statistics(scores: torch.Tensor, index: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, unbiased standard deviation and size of each row's group, all (B,).

    Groups are the rows with equal `index`. A group of one, or of scores that differ by no more than the rounding of a
    sum (1e-6, relative above 1), has std exactly 0.
    """
    return prompt_groups(index, scores.device).statistics(scores)


def are_equal(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return True where `high` >= `low` exceeds it by no more than rounding."""
    return high - low <= ROUNDING * high.abs().clamp(min=1)


def trajectory_scores(token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return the total reward of each trajectory (B,): of all its tokens (B, R), sampled or not.

    So a trajectory that is left out of the loss, its mask all 0, still counts in its group. A NaN outside the mask is
    no reward.
    """
    is_padding = token_level_rewards.isnan() & (response_mask <= 0)
    return torch.where(is_padding, 0.0, token_level_rewards).sum(dim=-1)


def on_sampled_tokens(values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return values of trajectories (B,) or of tokens (B, R) as (B, R), exactly 0 outside the mask."""
    return torch.where(response_mask > 0, values[:, None] if values.dim() == 1 else values, 0.0)
