"""Low-rank changes of matrices, and the names of their factors in weight syncs."""

from typing import NamedTuple

import torch

LEFT, RIGHT = ".change_left", ".change_right"
"""Suffixes of the factors' names, after the name of the changed tensor."""


class MatrixChange(NamedTuple):
    """The change left · right of one matrix."""

    left: torch.Tensor  # (rows, rank) float32
    right: torch.Tensor  # (rank, columns) float32

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """Return weight + left · right, summed in float32, in the dtype and on the device of `weight`."""
        left, right = (factor.to(weight.device) for factor in self)
        return (weight.float() + left @ right).to(weight.dtype)


def is_factor(name: str) -> bool:
    """Return True for the name of a factor."""
    return name.endswith((LEFT, RIGHT))
