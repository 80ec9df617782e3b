"""Prefix sharing: tokens that several rows begin with are computed once.

The samples of a group begin with the same prompt, and each row of a step-wise trajectory with the row before it. Every
layer but attention computes each token of the tree of prefixes once; attention reads the tokens of each row from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.sequence_parallel import SequenceGroup

NAME = "skyrl_prefix_tree"
BUCKET = 32  # tokens; positions and lengths in one attention call differ by less than this or a quarter
SPAN = 96  # minimum queries of an attention call on a CPU, if there are so many
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-3, 3e-2  # relative to the largest value, in float32 and in shorter types


@dataclass(slots=True)
class Bucket:
    """Rows of similar length that attend in the same calls: their tokens from `start` on to all of their tokens."""

    start: int
    keys: torch.Tensor  # (b, L) indices into the tokens of the tree; beyond the end of a row, 0
    _masks: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The positions [first, last) of the queries of each call.

        The kernel of a CPU also computes scores that the causal mask hides, so that few queries a call, with the keys
        up to the last of them, halve its work.
        """
        length = self.keys.shape[1]
        if self.keys.device.type != "cpu":
            return [(self.start, length)]
        n_spans = max(1, (length - self.start) // SPAN)
        edges = [self.start + (length - self.start) * i // n_spans for i in range(n_spans + 1)]
        return list(pairwise(edges))

    def mask(self, span: tuple[int, int], window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the mask (queries, keys) to add to the scores of a span: 0 for the keys that a query sees, up to
        itself and within the sliding window, and else -inf.

        None stands for the causal mask of a span that starts at 0. All layers share a mask of numbers: attention would
        convert one of booleans, and keep the result, in each of them.
        """
        first, last = span
        if window is not None and last <= window:
            window = None
        if first == 0 and window is None:
            return None
        key = (first, window, dtype)
        if key not in self._masks:
            positions = torch.arange(last, device=self.keys.device)
            distance = positions[first:, None] - positions
            is_hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
            self._masks[key] = torch.zeros(distance.shape, dtype=dtype, device=positions.device).masked_fill_(
                is_hidden, -torch.inf
            )
        return self._masks[key]


class PrefixTree:
    """The U distinct tokens of B rows: tokens with the same tokens before them are one."""

    def __init__(self, rows: Sequence[np.ndarray], device: torch.device) -> None:
        """Build the tree of rows of token ids."""
        order, n_shared = sort_by_prefix(rows)
        lengths = [len(row) for row in rows]
        index = np.zeros((len(rows), max(lengths, default=0)), dtype=np.int64)
        token_ids, position_ids, n_tokens = [], [], 0
        previous = order[0] if order else 0
        for row, shared in zip(order, n_shared, strict=True):
            index[row, :shared] = index[previous, :shared]
            n_new = lengths[row] - shared
            index[row, shared : lengths[row]] = np.arange(n_tokens, n_tokens + n_new)
            token_ids.append(rows[row][shared:])
            position_ids.append(np.arange(shared, lengths[row]))
            n_tokens += n_new
            previous = row

        # Tokens of a shared prefix need no queries here; where they are few, causal attention over all is faster.
        starts = [shared if 4 * shared >= lengths[row] else 0 for row, shared in zip(order, n_shared, strict=True)]
        keys = [(_round_down(start), -_round_down(-lengths[row])) for row, start in zip(order, starts, strict=True)]
        outputs = np.zeros(n_tokens, dtype=np.int64)  # index of each token among the queries of all calls
        self.buckets: list[Bucket] = []
        n_queries = 0
        for (start, _), members in groupby(sorted(range(len(order)), key=keys.__getitem__), key=keys.__getitem__):
            picked = [order[member] for member in members]
            bucket_index = index[picked, : max(lengths[row] for row in picked)]  # (b, L)
            bucket = Bucket(start, torch.from_numpy(bucket_index).to(device))
            self.buckets.append(bucket)
            is_token = np.arange(bucket_index.shape[1]) < np.array([[lengths[row]] for row in picked])
            for first, last in bucket.spans:
                tokens, real = bucket_index[:, first:last].ravel(), is_token[:, first:last].ravel()
                outputs[tokens[real]] = n_queries + np.flatnonzero(real)
                n_queries += len(tokens)
        self.index = torch.from_numpy(index).to(device)  # (B, L) of each row's tokens; beyond the end of a row, 0
        self.outputs = torch.from_numpy(outputs).to(device)  # (U,)
        self.token_ids = torch.from_numpy(np.concatenate([*token_ids, []]).astype(np.int64)).to(device)  # (U,)
        self.position_ids = torch.from_numpy(np.concatenate([*position_ids, []]).astype(np.int64)).to(device)  # (U,)


def _round_down(n_tokens: int) -> int:
    """Return a multiple of `BUCKET`, or of an eighth to a quarter of a large number."""
    unit = max(BUCKET, 1 << max(0, abs(n_tokens).bit_length() - 3))
    return n_tokens // unit * unit


def sort_by_prefix(rows: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """Sort rows of token ids lexicographically; return the order, and how many tokens each shares with the last one."""
    texts = [row.astype(">u4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=texts.__getitem__)
    return order, count_shared([rows[i] for i in order])


def count_shared(rows: Sequence[np.ndarray]) -> list[int]:
    """Return the number of tokens that each row shares with the beginning of the one before it."""
    n_shared = [0] * len(rows)
    for i, (last, row) in enumerate(pairwise(rows), start=1):
        n = min(len(last), len(row))
        different = np.flatnonzero(last[:n] != row[:n])
        n_shared[i] = int(different[0]) if len(different) else n
    return n_shared


def unpadded(sequences: torch.Tensor, attention_mask: torch.Tensor) -> list[np.ndarray]:
    """Return the tokens of each row of (B, L)."""
    masks = attention_mask.cpu().numpy().astype(bool)
    return [row[mask] for row, mask in zip(sequences.cpu().numpy(), masks, strict=True)]


def tree_hidden_states(model: PreTrainedModel, tree: PrefixTree, group: SequenceGroup | None = None) -> torch.Tensor:
    """Return the final hidden states (U, H) of the tokens of a tree; with `group`, of this rank's slice (u, H)."""
    token_ids, position_ids = tree.token_ids, tree.position_ids
    if group is not None:
        token_ids, position_ids = group.take_slice(token_ids), group.take_slice(position_ids)
    with tree_attention(model):
        output = model.base_model(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            prefix_tree=tree,
            sequence_group=group,
        )
    states: torch.Tensor = output.last_hidden_state[0]
    return states


@contextmanager
def tree_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use the attention of prefix trees, also in layers that are computed again in the backward pass."""
    config = model.config.get_text_config()
    previous = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = previous


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    prefix_tree: PrefixTree,
    sequence_group: SequenceGroup | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention (1, U, heads, d) of each token of a tree to itself and the tokens before it.

    The signature is that of transformers' attention functions; query is (1, heads, U, d). With `sequence_group`, query
    and attention are those of this rank's slice.
    """
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with capped scores or sinks")
    queries, keys, values = (
        states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value)
    )  # (U, heads, d)
    if sequence_group is not None:
        n_tokens = len(prefix_tree.token_ids)
        queries, keys, values = sequence_group.tokens_to_heads(queries, keys, values, n_tokens)

    def rows(states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        picked = states.index_select(0, indices.flatten())
        return picked.view(*indices.shape, *states.shape[1:]).transpose(1, 2)  # (b, heads, T, d)

    outputs = []
    for bucket in prefix_tree.buckets:
        row_keys, row_values = rows(keys, bucket.keys), rows(values, bucket.keys)
        for first, last in bucket.spans:
            mask = bucket.mask((first, last), sliding_window, values.dtype)
            attended = scaled_dot_product_attention(
                rows(queries, bucket.keys[:, first:last]),
                row_keys[:, :, :last],
                row_values[:, :, :last],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=True,
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1))  # (b · T, heads, d)
    states = torch.cat(outputs).index_select(0, prefix_tree.outputs)  # (U, heads, d)
    if sequence_group is not None:
        states = sequence_group.heads_to_tokens(states)
    return states[None], None


AttentionInterface.register(NAME, _attend)


@torch.no_grad()
def find_sharing_fault(model: PreTrainedModel, group: SequenceGroup | None = None) -> str | None:
    """Return why rows of a model cannot share prefixes, with tokens divided among the ranks of `group`; None if they
    can. Some architectures mix neighboring tokens.

    Raises:
        ConfigError: the heads of the model cannot be divided among the ranks.
    """
    rows = [np.array(row) for row in ([1, 2, 3, 4, 5], [1, 2, 3, 6], [7, 2], [1, 2, 3, 4, 5, 6, 7, 8, 1])]
    tolerance = TOLERANCE if model.dtype == torch.float32 else LOW_PRECISION_TOLERANCE
    tree = PrefixTree(rows, model.device)
    try:
        states = tree_hidden_states(model, tree, group).float()
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, NotImplementedError) as error:
        return f"it fails with shared prefixes: {error}"
    if group is not None:
        states = group.gather(states, len(tree.token_ids))
    for i, row in enumerate(rows):
        expected = (
            model.base_model(input_ids=torch.from_numpy(row)[None].to(model.device), use_cache=False)
            .last_hidden_state[0]
            .float()
        )
        difference = (states[tree.index[i, : len(row)]] - expected).abs().max() / expected.abs().max()
        if not difference < tolerance:
            return f"shared prefixes would change its hidden states by {difference:.1g}"
    return None
