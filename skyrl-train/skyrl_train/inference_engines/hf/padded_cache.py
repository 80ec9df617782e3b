"""A model's own cache, with sequences as the rows of one batch.

Rows are padded on the left to the length of the longest row, so all end in the same column. A mask hides the padding
from attention. Recurrent layers read zeros there and keep their zero state. For example, sequences of 5 and 3 tokens,
and one of 2 tokens that has just joined:

    row 0   a a a a a
    row 1   . . b b b      columns that only padding fills are cut off when row 0 leaves
    row 2   . . . c c

Transformers writes the layers of a cache, and `Cache.reorder_cache` repeats and removes rows in all of them. This
module adds padding and joining. A layer holds keys and values in the columns of tokens, the last `window - 1` of them
if its attention has a window, or one state per row, whose size does not depend on the tokens, or both.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from skyrl_train.errors import EngineError
from skyrl_train.media.spans import Spans
from skyrl_train.models.vision import find_encoder

KNOWN_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""Layers whose whole state is in the tensors below."""

BY_TOKEN = ("keys", "values", "indexer_keys")  # tensors (b, …, tokens, d) of a layer
BY_ROW = ("conv_states", "recurrent_states")  # dicts of tensors (b, …) of a layer


class PaddedCache:
    """The cache of b rows. Row i has read `lengths[i]` tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._images = find_encoder(model)
        self._cache: Cache | None = None
        self.lengths: list[int] = []
        self._offsets: list[int] = []  # position of the next token, minus the length. Images of M-RoPE make it negative

    @property
    def length(self) -> int:
        """Columns: the tokens of the longest row."""
        return max(self.lengths, default=0)

    @property
    def n_bytes(self) -> int:
        """Memory of all layers."""
        return sum(states.nbytes for layer in self._layers() for _, _, states in _tensors(layer))

    def read(self, rows: Sequence[Sequence[int]], images: Sequence[Spans] = ()) -> torch.Tensor:
        """Read new tokens, equally many per row unless the cache is empty. Return the last hidden states (b, H).

        `images` has the images of each row's new tokens.
        """
        device, n_new = self._model.device, max(map(len, rows))
        n_before = self.lengths or [0] * len(rows)
        lengths = [before + len(row) for before, row in zip(n_before, rows, strict=True)]
        n_columns, ends = max(n_before) + n_new, torch.tensor(lengths)[:, None]  # (b, 1)
        n_padded = [n_new - len(row) for row in rows]
        input_ids = torch.tensor([[0] * n + list(row) for n, row in zip(n_padded, rows, strict=True)], device=device)
        offsets = self._offsets or [0] * len(rows)
        position_ids = (ends - n_new + torch.arange(n_new)).clamp(min=0)  # (b, n_new)
        is_token = torch.arange(n_columns) >= n_columns - ends  # (b, columns)
        arguments: dict[str, Any] = {"input_ids": input_ids}
        if self._images is not None:
            images = images or [()] * len(rows)
            columns = [[span.shift(n) for span in spans] for n, spans in zip(n_padded, images, strict=True)]
            arguments = self._images.arguments(input_ids, columns, caches=True)
            types = self._images.type_argument
            if types in arguments:  # masks count the columns of the cache
                arguments[types] = pad(arguments[types], (n_columns - n_new, 0))
            position_ids, offsets = self._image_positions(position_ids, offsets, rows, images)
        output = self._model.base_model(
            **arguments,
            attention_mask=None if is_token.all() else is_token.long().to(device),
            position_ids=position_ids.to(device),
            past_key_values=self._cache,
            use_cache=True,
        )
        self._cache = output.past_key_values
        for layer in self._layers():
            if type(layer) not in KNOWN_LAYERS:
                raise EngineError(f"its cache has a {type(layer).__name__}, which cannot be padded and joined")
        self.lengths, self._offsets = lengths, offsets
        return output.last_hidden_state[:, -1]

    def _image_positions(
        self, counted: torch.Tensor, offsets: list[int], rows: Sequence[Sequence[int]], images: Sequence[Spans]
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the positions (3, b, n_new) of new tokens with M-RoPE, else (b, n_new), and the new offsets.

        An image of 24 tokens that takes 6 positions lowers the offset by 18.
        """
        assert self._images is not None
        found = [self._images.positions(row, spans) for row, spans in zip(rows, images, strict=True)]
        if found[0] is None:
            return counted, offsets
        positions = counted.repeat(3, 1, 1)
        new_offsets = []
        n_before = self.lengths or [0] * len(rows)
        for row, (own, before, offset) in enumerate(zip(found, n_before, offsets, strict=True)):
            assert own is not None
            positions[:, row, counted.shape[1] - own.shape[1] :] = own + before + offset
            new_offsets.append(offset + int(own.max()) + 1 - own.shape[1])
        return positions, new_offsets

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. A row may be repeated. Cut off columns that hold only padding."""
        assert self._cache is not None
        before = self.length
        if list(rows) != list(range(len(self.lengths))):
            self._cache.reorder_cache(torch.tensor(rows, device=self._model.device))  # type: ignore[arg-type]
            self.lengths = [self.lengths[row] for row in rows]
            self._offsets = [self._offsets[row] for row in rows]
        self._add_columns(self.length - before)

    def copy_row(self, row: int) -> "PaddedCache":
        """Return a cache with a copy of one row, without its padding."""
        twin = PaddedCache(self._model)
        twin._cache = copy.copy(self._cache)
        assert twin._cache is not None
        twin._cache.layers = [_copy_row(layer, row) for layer in self._layers()]
        twin.lengths, twin._offsets = [self.lengths[row]], [self._offsets[row]]
        twin._add_columns(twin.length - self.length)
        return twin

    def join(self, other: "PaddedCache") -> None:
        """Append the rows of another cache."""
        difference = self.length - other.length
        (other if difference > 0 else self)._add_columns(abs(difference))
        for layer, new in zip(self._layers(), other._layers(), strict=True):
            for (owner, key, states), (_, _, more) in zip(_tensors(layer), _tensors(new), strict=True):
                owner[key] = torch.cat([states, more])
        self.lengths += other.lengths
        self._offsets += other._offsets

    def _layers(self) -> Sequence[object]:
        return [] if self._cache is None else self._cache.layers

    def _add_columns(self, n: int) -> None:
        """Add columns of padding on the left, or cut off -n."""
        for layer in self._layers() if n else ():
            window = None
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length += n
                window = min(layer.cumulative_length, layer.sliding_window - 1)
            for owner, key, states in _tensors(layer):
                if key in BY_TOKEN:
                    size = states.shape[-2] + n if window is None else window
                    owner[key] = pad(states, (0, 0, size - states.shape[-2], 0))


def _copy_row(layer: object, row: int) -> Any:
    twin = copy.copy(layer)
    attributes = vars(twin)
    attributes.update({name: dict(value) for name, value in attributes.items() if isinstance(value, dict)})
    for owner, key, states in _tensors(twin):
        owner[key] = states[row : row + 1].clone()
    return twin


def _tensors(layer: object) -> Iterator[tuple[dict[str, torch.Tensor], str, torch.Tensor]]:
    """Yield (dict, key, tensor) of each tensor of a layer."""
    attributes = vars(layer)
    for name in BY_TOKEN:
        if isinstance(states := attributes.get(name), torch.Tensor) and states.numel():
            yield attributes, name, states
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name in BY_ROW:
            for key, states in list(attributes[name].items()):
                if states is not None:
                    yield attributes[name], key, states
