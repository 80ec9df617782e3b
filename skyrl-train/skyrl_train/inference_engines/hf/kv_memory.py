"""Key-value memory of the embedded engine: one flat pool of tokens per layer, allocated in regions.

A region is contiguous, so attention reads the keys of neighboring sequences in place.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skyrl_train.models.memory import CACHE_UNIT
from skyrl_train.types import UNKNOWN_EXPERT

UNIT = CACHE_UNIT  # tokens in the smallest region


class Extents:
    """First-fit allocator over [0, size): a sorted list of free extents. Neighboring free extents merge."""

    def __init__(self, size: int) -> None:
        self._starts, self._sizes = ([0], [size]) if size else ([], [])

    def allocate(self, size: int) -> int | None:
        """Return the start of a new extent, or None if no free extent is large enough."""
        for i, free_size in enumerate(self._sizes):
            if free_size >= size:
                start = self._starts[i]
                self._take(i, size)
                return start
        return None

    def extend(self, start: int, size: int, new_size: int) -> bool:
        """Extend an allocated extent in place to `new_size`. Return False if the space after it is taken."""
        i = bisect_left(self._starts, start + size)
        if i == len(self._starts) or self._starts[i] != start + size or self._sizes[i] < new_size - size:
            return False
        self._take(i, new_size - size)
        return True

    def _take(self, i: int, size: int) -> None:
        """Take `size` from the start of the i-th free extent."""
        self._starts[i] += size
        self._sizes[i] -= size
        if self._sizes[i] == 0:
            del self._starts[i], self._sizes[i]

    def free(self, start: int, size: int) -> None:
        """Free an allocated extent."""
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and start + size == self._starts[i]:  # merge with the next free extent
            size += self._sizes[i]
            del self._starts[i], self._sizes[i]
        if i > 0 and self._starts[i - 1] + self._sizes[i - 1] == start:  # merge with the previous free extent
            self._sizes[i - 1] += size
        else:
            self._starts.insert(i, start)
            self._sizes.insert(i, size)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the keys and values of `n_tokens` tokens, from offset `source` of the pool to `target`."""

    source: int
    target: int
    n_tokens: int


class KVMemory:
    """Keys and values of `size` tokens, per layer two tensors (size, heads, head_dim), zero at first.

    Layers are allocated when the model first writes to them, so shapes need not be read from a configuration. On a CPU,
    the system provides memory as it is written.
    """

    def __init__(self, size: int, expert_shape: tuple[int, int] | None = None) -> None:
        """Store keys and values, and with `expert_shape` (layers, K) also the experts that computed each token."""
        self.size = size
        self.expert_shape = expert_shape
        self.does_not_fit = False
        """True if a layer could not be allocated."""
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._experts: torch.Tensor | None = None

    @property
    def values_per_token(self) -> int:
        """Number of values that a layer stores per token, or 0 before the first write."""
        pools = next(iter(self._layers.values()), ())
        return sum(pool[0].numel() for pool in pools)

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pools of one layer, with the heads and dtypes of `keys` and `values` (…, heads, head_dim)."""
        if index not in self._layers:
            self.does_not_fit = True
            self._layers[index] = (self._zeros(keys), self._zeros(values))
            self.does_not_fit = False
        return self._layers[index]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Make all copies as if at once: every source is read before a target is written."""
        if not copies or not self._layers:
            return
        source = np.concatenate([np.arange(c.source, c.source + c.n_tokens) for c in copies])
        target = np.concatenate([np.arange(c.target, c.target + c.n_tokens) for c in copies])
        device = next(iter(self._layers.values()))[0].device
        target_index, source_index = torch.from_numpy(target).to(device), torch.from_numpy(source).to(device)
        for pools in self._layers.values():
            for pool in pools:
                pool[target_index] = pool[source_index]
        if self._experts is not None:
            self._experts[target_index] = self._experts[source_index]

    def expert_pool(self) -> torch.Tensor:
        """Return the experts of each token (size, layers, K) in int16, `UNKNOWN_EXPERT` before the first write."""
        if self._experts is None:
            assert self.expert_shape is not None
            device = next(iter(self._layers.values()))[0].device
            self._experts = torch.full(
                (self.size, *self.expert_shape), UNKNOWN_EXPERT, dtype=torch.int16, device=device
            )
        return self._experts

    def release(self) -> None:
        """Release the memory."""
        self._layers.clear()
        self._experts = None

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Return zeros, because masked attention reads unwritten entries. On a CPU, unwritten pages take no memory."""
        shape = (self.size, *like.shape[-2:])
        if like.device.type != "cpu":
            return like.new_zeros(shape)
        n_bytes = self.size * like.shape[-2] * like.shape[-1] * like.itemsize
        return torch.from_numpy(np.zeros(n_bytes, dtype=np.uint8)).view(like.dtype).view(shape)
