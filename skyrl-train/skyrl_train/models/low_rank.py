"""Low-rank changes of matrices, and the names of their factors in a weight sync."""

from __future__ import annotations

from typing import NamedTuple

import torch

LEFT, RIGHT = ".change_left", ".change_right"
"""Suffixes that the factors of a change have after the name of the changed tensor."""


class MatrixChange(NamedTuple):
    """The change left · right of one matrix."""

    left: torch.Tensor  # (rows, rank) float32
    right: torch.Tensor  # (rank, columns) float32

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the changed matrix, on the device of `weight`; the sum is computed in float32."""
        left, right = (factor.to(weight.device) for factor in self)
        return (weight.float() + left @ right).to(weight.dtype)

    def name_factors(self, name: str) -> list[tuple[str, torch.Tensor]]:
        """Return the factors with their names, for the change of the tensor `name`."""
        return [(name + LEFT, self.left), (name + RIGHT, self.right)]


def is_factor(name: str) -> bool:
    """Return True for the name of a factor."""
    return name.endswith((LEFT, RIGHT))
