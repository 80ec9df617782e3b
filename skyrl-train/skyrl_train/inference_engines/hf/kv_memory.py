"""Key-value memory of the embedded engine: one flat pool of tokens per layer, handed out in regions.

A region is contiguous, so that attention reads the keys of neighbouring sequences in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

UNIT = 64  # tokens; the smallest region


class Extents:
    """Which parts of [0, size) are free: first fit, and neighbours merge."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.clear()

    def clear(self) -> None:
        """Everything is free."""
        self._starts, self._sizes = ([0], [self._size]) if self._size else ([], [])

    def allocate(self, size: int) -> int | None:
        """Where the first free part of that size begins, now taken; None if there is none."""
        for i, there in enumerate(self._sizes):
            if there >= size:
                start = self._starts[i]
                self._starts[i], self._sizes[i] = start + size, there - size
                if there == size:
                    del self._starts[i], self._sizes[i]
                return start
        return None

    def extend(self, start: int, size: int, new_size: int) -> bool:
        """Let a taken part of `size` go on to `new_size`, where what follows it is free."""
        i = bisect_left(self._starts, start + size)
        more = new_size - size
        if i == len(self._starts) or self._starts[i] != start + size or self._sizes[i] < more:
            return False
        self._starts[i], self._sizes[i] = start + new_size, self._sizes[i] - more
        if self._sizes[i] == 0:
            del self._starts[i], self._sizes[i]
        return True

    def free(self, start: int, size: int) -> None:
        """Give a part back."""
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and start + size == self._starts[i]:  # up to the next free part
            size += self._sizes[i]
            del self._starts[i], self._sizes[i]
        if i > 0 and self._starts[i - 1] + self._sizes[i - 1] == start:  # from the one before
            self._sizes[i - 1] += size
        else:
            self._starts.insert(i, start)
            self._sizes.insert(i, size)


@dataclass(frozen=True, slots=True)
class Copy:
    """The keys and values of `n_tokens` tokens, to be copied from one place of the pool to another."""

    source: int
    target: int
    n_tokens: int


class KVMemory:
    """Keys and values of `size` tokens, per layer two tensors (size, heads, head_dim), zero at first.

    Layers are made when the model first writes to them, so that no model configuration is read here. On a CPU, memory
    is taken as it is written.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool of one layer, with heads and types like those given (…, heads, head_dim)."""
        if index not in self._layers:
            self._layers[index] = (self._zeros(keys), self._zeros(values))
        return self._layers[index]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Carry out copies, as if all at once."""
        if not copies or not self._layers:
            return
        source = np.concatenate([np.arange(c.source, c.source + c.n_tokens) for c in copies])
        target = np.concatenate([np.arange(c.target, c.target + c.n_tokens) for c in copies])
        device = next(iter(self._layers.values()))[0].device
        to, of = torch.from_numpy(target).to(device), torch.from_numpy(source).to(device)
        for pools in self._layers.values():
            for pool in pools:
                pool.index_copy_(0, to, pool.index_select(0, of))

    def release(self) -> None:
        """Give the memory back."""
        self._layers.clear()

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros, so that what a sequence has not written yet is finite; on a CPU, pages that nobody has touched."""
        shape = (self.size, *like.shape[-2:])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        n_bytes = self.size * like.shape[-2] * like.shape[-1] * like.itemsize
        return torch.from_numpy(np.zeros(n_bytes, dtype=np.uint8)).view(like.dtype).view(shape)
