"""Exact differences between two versions of a tensor: the new bits of the values that changed.

A change is stored as its distance from the previous change, in one byte, and its new bits. If two changes are more than
256 values apart, some unchanged values between them are sent too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per value
MAX_GAP = 256


class Changes(NamedTuple):
    """Values of a tensor to set."""

    gaps: torch.Tensor  # (n,) uint8: distance from the previous value, minus 1
    bits: torch.Tensor  # (n,) integers of the size of a value

    @property
    def n_bytes(self) -> int:
        """Size of both parts."""
        return self.gaps.nbytes + self.bits.nbytes

    def apply(self, bits: torch.Tensor) -> None:
        """Set the values in the old bits (N,), in place."""
        positions = (self.gaps.long() + 1).cumsum(0) - 1
        bits[positions.to(bits.device)] = self.bits.to(bits.device)


def find_changes(old: torch.Tensor, new: torch.Tensor) -> Changes:
    """Return the changes from old to new bits (N,).

    >>> find_changes(old=torch.tensor([1, 2, 3, 4]), new=torch.tensor([1, 9, 3, 8]))  # positions 1 and 3, after -1
    Changes(gaps=tensor([1, 1], dtype=torch.uint8), bits=tensor([9, 8]))
    """
    positions = (old != new).nonzero().squeeze(1)
    gaps = positions.diff(prepend=positions.new_full((1,), -1))  # at least 1
    n_steps = (gaps - 1) // MAX_GAP + 1
    steps = torch.full((int(n_steps.sum()),), MAX_GAP, dtype=torch.int64, device=new.device)
    steps[n_steps.cumsum(0) - 1] = gaps - MAX_GAP * (n_steps - 1)
    return Changes((steps - 1).to(torch.uint8), new[steps.cumsum(0) - 1])


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View the values of a contiguous tensor as integers (N,), without a copy."""
    return tensor.detach().view(-1).view(INT_OF_SIZE[tensor.element_size()])
