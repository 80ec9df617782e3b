"""Key-value memory of the embedded engine: one slot a sequence, all slots of one length, grown when needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

GROW_TO_MULTIPLE_OF = 64  # tokens


def rounded_length(n_tokens: int) -> int:
    """The slot length for a sequence of `n_tokens`: rounded up, so that slots grow rarely."""
    return -(-n_tokens // GROW_TO_MULTIPLE_OF) * GROW_TO_MULTIPLE_OF


class KVMemory:
    """Keys and values of `n_slots` sequences, per layer two tensors (n_slots, heads, length, head_dim).

    Layers are allocated when the model first writes to them, so that no model configuration is read here.
    """

    def __init__(self) -> None:
        self.n_slots = 0
        self.length = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, n_slots: int, length: int) -> None:
        """Make room for at least `n_slots` sequences of `length` tokens, keeping what is stored."""
        if n_slots <= self.n_slots and length <= self.length:
            return
        self.n_slots = max(n_slots, self.n_slots)
        self.length = max(length, self.length)
        for index, (keys, values) in self._layers.items():
            self._layers[index] = (self._grown(keys), self._grown(values))

    def copy(self, sources: Sequence[int], targets: Sequence[int], n_tokens: int) -> None:
        """Copy the first `n_tokens` of each source slot into its target slot."""
        for keys, values in self._layers.values():
            for tensor in (keys, values):
                tensor[targets, :, :n_tokens] = tensor[sources, :, :n_tokens]

    def release(self) -> None:
        """Give the memory back."""
        self._layers.clear()
        self.n_slots = self.length = 0

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored keys and values of one layer, with heads and types like those given (b, heads, T, head_dim).

        Under autocast the two have different types: rotary embeddings leave keys in float32.
        """
        if index not in self._layers:
            self._layers[index] = (self._empty(keys), self._empty(values))
        return self._layers[index]

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.n_slots, like.shape[1], self.length, like.shape[3])

    def _grown(self, tensor: torch.Tensor) -> torch.Tensor:
        grown = self._empty(tensor)
        grown[: tensor.shape[0], :, : tensor.shape[2]] = tensor
        return grown


class StepCache:
    """The cache of one forward pass: b slots, each with T new tokens (padded on the right) after its stored ones.

    A Hugging Face model calls `update` in every attention layer and attends to what it returns.
    """

    is_compileable = False

    def __init__(self, slots: KVMemory, rows: Sequence[int], positions: torch.Tensor, n_new: torch.Tensor) -> None:
        self._slots = slots
        self._rows = torch.as_tensor(rows, device=positions.device)  # (b,)
        is_token = torch.arange(positions.shape[1], device=positions.device) < n_new[:, None]  # (b, T)
        self._source = is_token.nonzero(as_tuple=True)  # rows of the pass, columns of the pass
        self._target = (self._rows[self._source[0]], positions[is_token])  # slots, positions
        self.length = int(positions[is_token].max()) + 1  # longest sequence after this pass
        first = rows[0]
        self._is_range = list(rows) == list(range(first, first + len(rows)))
        self._range = slice(first, first + len(rows))

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values (b, heads, T, head_dim); return all stored ones (b, heads, length, head_dim)."""
        stored = self._slots.layer(layer_idx, keys, values)
        rows, columns = self._source
        slots, positions = self._target
        for memory, new in zip(stored, (keys, values), strict=True):
            memory[slots, :, positions] = new[rows, :, columns]
        picked = self._range if self._is_range else self._rows
        return stored[0][picked, :, : self.length], stored[1][picked, :, : self.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen before this pass; positions and mask are given explicitly, so nothing depends on it."""
        return 0
