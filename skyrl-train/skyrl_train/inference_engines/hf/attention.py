"""Attention of one packed forward pass: new tokens of all sequences in one row, keys read in place.

The new tokens of all sequences are one row of N tokens without padding. Everything but attention treats them alike.
For attention, sequences with equally many new tokens and neighboring regions of the same size form a run, and a run is
one call of PyTorch's attention. For example, three sequences decode one token each:

    region (128 tokens each)    0 … 127    128 … 255    256 … 383
    stored after this pass      70         80           75

Their keys are a strided view (3, heads, 80, d) of the pool, with a stride of 128 tokens between sequences. Nothing is
copied. A mask hides what is beyond the 70 and 75 tokens of the shorter sequences. Query heads that share a key head are
folded into one query (n, key heads, heads per key head · T, d), so keys are not repeated.

On a CPU, decoding samples of the same prompt read its keys together. Attention to the prefix and to the rest of each
sequence are two calls. Each returns its output o and the log-sum-exp of its scores, a for the prefix and b for the
rest, and the whole is w · o_prefix + (1 - w) · o_rest with w = e^a / (e^a + e^b) = σ(a - b) (Hydragen, Juravsky et al.,
2024, arXiv:2402.05099).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.hf.kv_memory import UNIT, KVMemory
from skyrl_train.inference_engines.hf.scheduler import Row
from skyrl_train.models.last_layer import MAX_SHARE, KeysAndValues, is_narrow
from skyrl_train.models.prefix_sharing import causal_mask, use_attention
from skyrl_train.models.routing import Routers
from skyrl_train.models.vision import find_encoder

NAME = "skyrl_packed"
MASK_SIZE = 1 << 24  # maximum elements of a mask: 64 MiB in float32
MIN_SAVED = 1 << 21  # minimum of values per layer that sharing a prefix must save from being read


@dataclass(frozen=True, slots=True)
class PoolSlice:
    """The first L tokens of n sequences in the pools, at evenly spaced or listed indices."""

    n_sequences: int
    length: int  # L
    start: int = 0  # index of the first sequence
    spacing: int = 0  # tokens between the starts of sequences
    indices: torch.Tensor | None = None  # (n · L,) if they are listed

    def view(self, pool: torch.Tensor) -> torch.Tensor:
        """Return the stored keys or values (n, heads, L, d): a view, or a copy for listed indices."""
        if self.indices is not None:
            copied = pool.index_select(0, self.indices)
            return copied.view(self.n_sequences, self.length, *pool.shape[1:]).transpose(1, 2)
        token_stride, head_stride, value_stride = pool.stride()
        shape = (self.n_sequences, pool.shape[1], self.length, pool.shape[2])
        strides = (self.spacing * token_stride, head_stride, token_stride, value_stride)
        return pool.as_strided(shape, strides, self.start * token_stride)


def pool_slice(starts: Sequence[int], length: int, size: int, device: torch.device) -> PoolSlice:
    """Return the slice of sequences with these starts. It may extend beyond the `size` tokens of the memory."""
    distances = {second - first for first, second in pairwise(starts)}
    if len(distances) <= 1 and starts[-1] + length <= size:
        return PoolSlice(len(starts), length, starts[0], max(distances, default=0))
    indices = torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)
    return PoolSlice(len(starts), length, indices=indices.clamp(max=size - 1).flatten())


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first tokens of the n sequences of a run, equal within each of G groups of up to S sequences."""

    stored: PoolSlice  # the prefix in one sequence of each group
    members: torch.Tensor  # (G, S) sequences of each group, padded with the group's first sequence
    slots: torch.Tensor  # (n,) index of each sequence in `members.flatten()`


@dataclass(slots=True)
class RowRun:
    """n sequences of T new tokens each that share one call of attention."""

    tokens: slice  # the run's tokens among the tokens of the pass
    stored: PoolSlice  # tokens stored after the pass, up to the longest sequence or further
    positions: torch.Tensor  # (n, T)
    is_causal: bool  # True if nothing was stored before, so queries and keys are the same tokens
    sees_all: bool  # True if every query sees all keys
    prefix: SharedPrefix | None = None  # set if reading it only once saves time
    _masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, queries: slice, n_keys: int, n_shared: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask (n, 1, heads per key head · queries, keys) to add to the attention scores.

        A mask of all queries is cached for the other layers. `n_shared` is the number of query heads per key head.
        """
        key = (n_shared, window, dtype)
        if key in self._masks:
            return self._masks[key]
        keys = torch.arange(n_keys, device=self.positions.device)
        distance = self.positions[:, None, queries, None] - keys
        mask = causal_mask(distance, window, dtype).repeat(1, 1, n_shared, 1)
        if mask.shape[2] == n_shared * self.positions.shape[1]:
            self._masks[key] = mask
        return mask


@dataclass(frozen=True, slots=True)
class _Stored:
    """Keys or values as `packed_attention` receives them: the pool of a layer, and the runs of the pass."""

    pool: torch.Tensor  # (size, heads, d)
    runs: Sequence[RowRun]


PlanRuns = Callable[[Sequence[Row], torch.Tensor, KVMemory], Iterable[RowRun]]
"""Function that joins rows, whose new tokens have the positions (N,), into runs of consecutive rows."""


class PackedCache:
    """The cache of one pass over N tokens: several sequences, packed one after the other.

    A Hugging Face model calls `update` in every attention layer and passes the result to `packed_attention`.
    """

    is_compileable = False

    def __init__(
        self, memory: KVMemory, rows: Sequence[Row], device: torch.device, plan_runs: PlanRuns, *, narrows: bool
    ) -> None:
        """Plan a pass of `hidden_states`. If it `narrows`, the last layer computes only the last token of each row."""
        self._memory = memory
        n_before, n_new, starts = np.array([(row.n_before, row.n_new, row.start) for row in rows]).T
        ends = n_new.cumsum()
        position_ids = np.arange(ends[-1]) + np.repeat(n_before - (ends - n_new), n_new)
        self.position_ids = torch.from_numpy(position_ids).to(device)  # (N,) in the sequence
        self.rotary_ids = self.position_ids  # (N,) for rotary embeddings
        if any(offsets := [row.sequence.position_offset for row in rows]):
            self.rotary_ids = self.position_ids + torch.from_numpy(np.repeat(offsets, n_new)).to(device)
        target = position_ids + np.repeat(starts, n_new)
        self._target = torch.from_numpy(target).to(device)  # (N,) indices into the pool
        self._runs = list(plan_runs(rows, self.position_ids, memory))
        self.last_tokens: torch.Tensor | None = None  # (n rows,) indices, if the pass narrows
        self._last_runs: list[RowRun] = []
        if narrows:
            self.last_tokens = torch.from_numpy(ends - 1).to(device)
            last_rows = [Row(row.sequence, 1, row.n_skipped + row.n_new - 1) for row in rows]
            self._last_runs = list(plan_runs(last_rows, self.position_ids[self.last_tokens], memory))

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[_Stored, _Stored]:
        """Store new keys and values (1, heads, N, d). Return the layer's keys and values with the runs to compute.

        If the pass narrows, the last layer calls this twice. The second call has only the last tokens of the sequences,
        which are already stored, and gets the runs of those. Under autocast, rotary embeddings return float32 keys, and
        they are stored in the dtype of the values.
        """
        keys = keys.to(values.dtype)
        pools = self._memory.layer(layer_idx, keys.transpose(1, 2), values.transpose(1, 2))
        runs = self._runs
        if keys.shape[2] == len(self._target):
            for pool, new in zip(pools, (keys, values), strict=True):
                pool[self._target] = new[0].transpose(0, 1)
        else:
            runs = self._last_runs
        return _Stored(pools[0], runs), _Stored(pools[1], runs)

    def store_experts(self, layer_idx: int, experts: torch.Tensor) -> None:
        """Store the experts (N, K) of the new tokens."""
        self._memory.expert_pool()[self._target, layer_idx] = experts.to(torch.int16)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0. Positions are explicit, so the model needs no past length."""
        return 0


def join_neighbors(rows: Sequence[Row], position_ids: torch.Tensor, memory: KVMemory) -> Iterator[RowRun]:
    """Join neighboring rows with equally many new tokens and regions of the same size into runs."""
    first, n_tokens = 0, 0
    while first < len(rows):
        end = first + 1
        while end < len(rows) and _is_neighbor(rows[end], rows[end - 1]):
            end += 1
        joined, n_new = rows[first:end], rows[first].n_new
        tokens = slice(n_tokens, n_tokens + len(joined) * n_new)
        positions = position_ids[tokens].view(len(joined), n_new)
        lengths = [row.n_before + n_new for row in joined]
        yield RowRun(
            tokens,
            PoolSlice(len(joined), max(lengths), joined[0].start, joined[0].region.capacity),
            positions,
            is_causal=max(lengths) == n_new,
            sees_all=n_new == 1 and min(lengths) == max(lengths),
            prefix=_find_shared_prefix(joined, memory, positions.device) if n_new == 1 else None,
        )
        first, n_tokens = end, tokens.stop


def _is_neighbor(row: Row, before: Row) -> bool:
    capacity = before.region.capacity
    return row.n_new == before.n_new and row.region.capacity == capacity and row.start == before.start + capacity


def _find_shared_prefix(rows: Sequence[Row], memory: KVMemory, device: torch.device) -> SharedPrefix | None:
    """Return the shared prefix of decoding rows that saves the most reads, or None if that is under `MIN_SAVED`."""
    n_units = min(row.n_before for row in rows) // UNIT
    min_saved = MIN_SAVED / max(1, memory.values_per_token)  # tokens
    if device.type != "cpu" or len(rows) * n_units * UNIT < min_saved:
        return None
    keys = [row.sequence.prompt_keys() for row in rows]
    best, most_saved = 0, 0
    for n in range(1, min(n_units, min(map(len, keys))) + 1):
        sizes = Counter(key[n - 1] for key in keys).values()
        n_saved = n * UNIT * (len(rows) - len(sizes))
        if n_saved > most_saved and len(sizes) * max(sizes) <= 2 * len(rows):  # padding may at most double the rows
            best, most_saved = n, n_saved
    if best == 0 or most_saved < min_saved:
        return None
    groups: dict[int, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key[best - 1], []).append(i)
    n_slots = max(map(len, groups.values()))
    members, slots = np.zeros((len(groups), n_slots), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    for i, group in enumerate(groups.values()):
        members[i] = [*group, *[group[0]] * (n_slots - len(group))]
        slots[group] = i * n_slots + np.arange(len(group))
    stored = pool_slice([rows[group[0]].start for group in groups.values()], best * UNIT, memory.size, device)
    return SharedPrefix(stored, torch.from_numpy(members), torch.from_numpy(slots))


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: _Stored,
    value: _Stored,
    attention_mask: torch.Tensor | None,
    *,
    wants_keys: bool = False,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention of new queries (1, heads, N, d) to the stored tokens of their sequences.

    Transformers defines the signature, but its mask is ignored. The runs have their own. Returns (1, N, heads, d).
    """
    if softcap is not None or s_aux is not None:
        raise EngineError("its attention caps its scores, or has sinks")
    if wants_keys:
        raise KeysAndValues(key, value)
    tokens = query[0].transpose(0, 1)  # (N, heads, d)
    outputs = []
    for run in key.runs:
        keys, values = run.stored.view(key.pool), run.stored.view(value.pool)  # (n, key heads, L, d)
        # Group heads by the key head that they share.
        grouped = tokens[run.tokens].reshape(*run.positions.shape, keys.shape[1], -1, query.shape[-1])
        queries = grouped.permute(0, 2, 3, 1, 4).to(keys.dtype)  # (n, key heads, heads per key head, T, d)
        sees_prefix = sliding_window is None or run.stored.length <= sliding_window
        if run.prefix is not None and sees_prefix and keys.shape == values.shape:
            attended = _attend_shared(queries, (key.pool, value.pool), (keys, values), run, run.prefix, scaling)
        else:
            attended = _attend(queries, keys, values, run, scaling, sliding_window)
        outputs.append(attended.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2))  # (n · T, heads, d)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    run: RowRun,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the attention of one run (n, key heads, heads per key head, T, d)."""
    if window is not None and run.stored.length <= window:
        window = None
    if run.is_causal and window is None and run.positions.shape[1] > 1:
        whole = scaled_dot_product_attention(
            queries.flatten(1, 2), keys, values, is_causal=True, scale=scaling, enable_gqa=True
        )
        return whole.view(*queries.shape[:4], -1)
    if run.sees_all and window is None:
        folded = scaled_dot_product_attention(queries.flatten(2, 3), keys, values, scale=scaling)
        return folded.view(*queries.shape[:4], -1)
    n_shared, n_new = queries.shape[2:4]
    size = max(1, MASK_SIZE // (len(queries) * n_shared * run.stored.length))
    blocks = []
    for begin in range(0, n_new, size):
        block = queries[:, :, :, begin : begin + size]
        n_keys = run.stored.length - max(0, n_new - begin - size)
        mask = run.mask(slice(begin, begin + size), n_keys, n_shared, window, queries.dtype)
        folded = scaled_dot_product_attention(
            block.flatten(2, 3), keys[:, :, :n_keys], values[:, :, :n_keys], attn_mask=mask, scale=scaling
        )
        blocks.append(folded.view(*block.shape[:4], -1))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=3)


def _attend_shared(
    queries: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    run_states: tuple[torch.Tensor, torch.Tensor],
    run: RowRun,
    prefix: SharedPrefix,
    scaling: float | None,
) -> torch.Tensor:
    """Return the attention of one decoding run (n, key heads, heads per key head, 1, d), as the module explains.

    Keys and values of the prefix come from the `pools`, of the rest from the run's own (n, key heads, L, d).
    """
    n_shared, n_prefix = queries.shape[2], prefix.stored.length
    own_queries = queries.flatten(2, 3)  # (n, key heads, heads per key head, d)
    grouped = own_queries.index_select(0, prefix.members.flatten()).unflatten(0, prefix.members.shape)
    shared, shared_lse = _attend_with_lse(
        grouped.transpose(1, 2).flatten(2, 3), *map(prefix.stored.view, pools), scale=scaling
    )  # (G, key heads, S · heads per key head, d), (G, key heads, S · heads per key head)
    mask = None
    if not run.sees_all:
        mask = run.mask(slice(0, 1), run.stored.length, n_shared, None, queries.dtype)[..., n_prefix:]
    rest = (states[:, :, n_prefix:] for states in run_states)
    own, own_lse = _attend_with_lse(own_queries, *rest, attn_mask=mask, scale=scaling)
    shared, shared_lse = (
        values.unflatten(2, (-1, n_shared)).transpose(1, 2).flatten(0, 1).index_select(0, prefix.slots)
        for values in (shared, shared_lse)
    )
    weight = torch.sigmoid(shared_lse - own_lse).unsqueeze(-1).to(own.dtype)
    return torch.lerp(own, shared, weight).unsqueeze(3)


_attend_with_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Attention that also returns the log-sum-exp of each query's scores. PyTorch's public function does not return it."""


def hidden_states(
    model: PreTrainedModel,
    memory: KVMemory,
    rows: Sequence[Row],
    *,
    last_only: bool = False,
    plan_runs: PlanRuns = join_neighbors,
) -> torch.Tensor:
    """Return the last hidden states (N, H) of the new tokens of `rows`, and store their keys and values.

    Chosen experts are stored too if the memory has room for them. `last_only` returns only the states of each row's
    last token (n rows, H). Rows are in the order of their regions.
    """
    new_ids = [row.sequence.token_ids[row.n_before :][: row.n_new] for row in rows]
    input_ids = torch.tensor(list(chain.from_iterable(new_ids)), device=model.device)  # (N,)
    if (encoder := find_encoder(model)) is not None:
        input_ids = encoder.as_text(input_ids)
    records = memory.expert_shape is not None  # the experts of all tokens, in every layer
    narrows = not records and last_only and len(rows) <= MAX_SHARE * len(input_ids) and is_narrow(model)
    cache = PackedCache(memory, rows, model.device, plan_runs, narrows=narrows)
    recording = Routers.of(model).recording(cache.store_experts) if records else nullcontext()
    with use_attention(model, NAME), recording:
        output = model.base_model(
            input_ids=input_ids[None],
            position_ids=cache.rotary_ids[None],
            past_key_values=cache,
            use_cache=True,
            **({"selected_tokens": cache.last_tokens} if narrows else {}),
        )
    states: torch.Tensor = output.last_hidden_state[0]
    if last_only and not narrows:
        return states[torch.tensor([row.n_new for row in rows], device=model.device).cumsum(0) - 1]
    return states


AttentionInterface.register(NAME, packed_attention)
