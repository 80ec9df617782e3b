"""Prefix sharing: compute prefixes shared within a micro-batch once.

The samples of a group start with the same prompt, and each row of a step-wise trajectory starts with the row before it.
Such rows form a tree. A token of the tree stands for all tokens with the same id and the same tokens before them. These
B = 3 rows have 8 tokens, but their tree has only U = 6:

    row 0   5 6 7 8          token_ids      4 5 6 7 8 9
    row 1   5 6 9            position_ids   0 0 1 2 3 2
    row 2   4                index          row 0: 1 2 3 4    row 1: 1 2 5 .    row 2: 0 . . .

The model runs on the tree as one row of U tokens. A causal model's hidden state depends only on a token, its position
and the tokens before it, and these are equal for all rows that share it. So embeddings, norms, MLPs and projections
compute each token once, packed and without padding. Only attention needs rows: it gathers the keys and values of each
row through `index`, and computes the queries of the tokens that the row adds. Its result is scattered back to the tree.
The invariant is `states[index[b, t]]` = the hidden state of token t when row b is computed alone, and
`find_sharing_fault` tests it on every loaded model.

On a CPU, the last layer computes keys and values of all tokens, but everything else only of the `selected` ones
(`models/last_layer.py`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.attributes import crossing_windows, with_attribute
from skyrl_train.models.last_layer import MAX_SHARE, KeysAndValues, is_narrow, widen_last_layer
from skyrl_train.models.sequence_parallel import SequenceGroup
from skyrl_train.out_of_memory import is_out_of_memory
from skyrl_train.types import UNKNOWN_EXPERT

NAME = "skyrl_prefix_tree"
BUCKET = 32  # tokens by which positions and lengths in one attention call may differ (a quarter of large lengths)
SPAN = 192  # minimum queries per call on a CPU: with fewer, the kernel processes only 32 at a time
SHARED_COST = 0.25
"""Cost of a token in a shared prefix, relative to a new token. Attention reads it, but nothing computes it again."""
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-3, 3e-2  # relative to the largest value, in float32 and in shorter dtypes


def causal_mask(distance: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the attention mask: 0 for keys up to the query and within the sliding window, -inf for all others.

    `distance` is the query's position minus the key's.
    """
    is_hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    return torch.zeros_like(is_hidden, dtype=dtype).masked_fill_(is_hidden, -torch.inf)


@dataclass(slots=True)
class AttentionCall:
    """The queries of one attention call: T positions of the b rows of a bucket, with keys up to the last position."""

    positions: torch.Tensor  # (T,), ascending
    queries: torch.Tensor  # (b, T) indices into the tokens that have queries
    n_keys: int  # last position + 1
    is_contiguous: bool  # the positions are 0, 1, … T - 1, so a plain causal mask fits
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the mask (T, n_keys) to add to the attention scores, or None if the call is plainly causal.

        It is not boolean, because attention would convert a boolean mask, and keep the copy, in every layer.
        """
        if window is not None and self.n_keys <= window:
            window = None
        if self.is_contiguous and window is None:
            return None
        key = (window, dtype)
        if key not in self._masks:
            distance = self.positions[:, None] - torch.arange(self.n_keys, device=self.positions.device)
            self._masks[key] = causal_mask(distance, window, dtype)
        return self._masks[key]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows of similar length that attend in the same calls."""

    keys: torch.Tensor  # (b, L) indices into the tree's tokens, 0 beyond the end of a row
    calls: list[AttentionCall]


class Queries:
    """The attention calls that compute selected tokens of a tree.

    Rows whose queries span similar positions share a bucket and are padded to a common range. Padding is computed but
    discarded, because `outputs` takes each token's result from one of the real queries. In the module's example, row 2
    has one query, row 0 four, and row 1 only one, for token 9 at position 2.
    """

    def __init__(self, index: np.ndarray, is_query: np.ndarray, tokens: np.ndarray, device: torch.device) -> None:
        """Plan calls for the rows in `index` (B, L).

        `tokens` (M,) lists the tokens to compute, ascending. `is_query` (B, L) marks at least one query for each.
        """
        sizes = {}
        for row in np.flatnonzero(is_query.any(axis=1)).tolist():
            first, last = np.flatnonzero(is_query[row])[[0, -1]].tolist()
            sizes[row] = (_round_down(first), -_round_down(-last - 1))  # round last + 1 up
        outputs = np.zeros(len(tokens), dtype=np.int64)  # (M,) index of each token among the queries of all calls
        n_queries = 0
        self.buckets: list[Bucket] = []
        for _, members in groupby(sorted(sizes, key=sizes.__getitem__), key=sizes.__getitem__):
            rows = np.array(list(members))  # (b,)
            columns = np.flatnonzero(is_query[rows].any(axis=0))  # positions where any of these rows has a query
            calls = []
            for positions in np.array_split(columns, max(1, len(columns) // SPAN) if device.type == "cpu" else 1):
                # (b, T). Padding may have a token after all selected ones, and `clip` gives it a valid slot.
                slots = np.searchsorted(tokens, index[np.ix_(rows, positions)]).clip(max=len(tokens) - 1)
                is_real = is_query[np.ix_(rows, positions)]  # (b, T)
                outputs[slots[is_real]] = n_queries + np.flatnonzero(is_real)
                n_queries += slots.size
                n_keys = int(positions[-1]) + 1
                calls.append(
                    AttentionCall(
                        torch.from_numpy(positions).to(device),
                        torch.from_numpy(slots).to(device),
                        n_keys,
                        is_contiguous=len(positions) == n_keys,
                    )
                )
            keys = torch.from_numpy(index[rows, : columns[-1] + 1]).to(device)
            self.buckets.append(Bucket(keys, calls))
        self.outputs = torch.from_numpy(outputs).to(device)  # (M,)


class PrefixTree:
    """The U distinct tokens of B rows. The module's docstring has an example."""

    def __init__(
        self, rows: Sequence[np.ndarray], device: torch.device, selected: tuple[torch.Tensor, ...] | None = None
    ) -> None:
        """Build the tree of rows of token ids.

        `selected` are the rows (N,) and positions (N,) of the tokens whose hidden states are needed. None means all.
        """
        # In lexicographic order, no earlier row shares a longer prefix with a row than the one right before it. So
        # comparing neighbors builds the whole tree.
        order, n_shared = sort_by_prefix(rows)
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        index = np.zeros((len(rows), max(lengths, default=0)), dtype=np.int64)
        starts = np.zeros(len(rows), dtype=np.int64)  # of the queries of each row
        token_ids, position_ids, n_tokens = [], [], 0
        previous = order[0] if order else 0
        for row, shared in zip(order, n_shared, strict=True):
            index[row, :shared] = index[previous, :shared]
            n_new = lengths[row] - shared
            index[row, shared : lengths[row]] = np.arange(n_tokens, n_tokens + n_new)
            token_ids.append(rows[row][shared:])
            position_ids.append(np.arange(shared, lengths[row]))
            # An earlier row has the queries of the shared prefix. If it is short, computing them again is faster,
            # because the row is then plainly causal and needs no mask.
            starts[row] = shared if 4 * shared >= lengths[row] else 0
            n_tokens += n_new
            previous = row
        self.lengths: list[int] = lengths.tolist()  # of the rows
        columns = np.arange(index.shape[1])
        is_query = (columns >= starts[:, None]) & (columns < lengths[:, None])
        self.queries = Queries(index, is_query, np.arange(n_tokens), device)
        self.index = torch.from_numpy(index).to(device)  # (B, L) of each row's tokens, 0 beyond the end of a row
        self.token_ids = torch.from_numpy(np.concatenate([*token_ids, []]).astype(np.int64)).to(device)  # (U,)
        self.position_ids = torch.from_numpy(np.concatenate([*position_ids, []]).astype(np.int64)).to(device)  # (U,)
        self.selected: torch.Tensor | None = None  # (M,) distinct selected tokens, ascending
        if selected is not None:
            indices = tuple(part.cpu().numpy() for part in selected)
            tokens = np.unique(index[indices])
            if 0 < len(tokens) <= MAX_SHARE * n_tokens:
                is_query[:] = False
                is_query[indices] = True
                self.selected = torch.from_numpy(tokens).to(device)
                self.selected_queries = Queries(index, is_query, tokens, device)

    def merge_experts(self, experts: torch.Tensor) -> torch.Tensor:
        """Return the experts (U, …) of the tree's tokens, each from the first row that knows them, if any.

        `experts` (N, …) belong to the N tokens of all rows, row by row.
        """
        lengths = torch.tensor(self.lengths, device=self.index.device)
        is_token = torch.arange(self.index.shape[1], device=self.index.device) < lengths[:, None]  # (B, L)
        tokens = self.index[is_token].cpu().numpy()  # (N,)
        is_unknown = (experts == UNKNOWN_EXPERT).flatten(1).all(dim=1).cpu().numpy()
        order = np.argsort(is_unknown, kind="stable")
        firsts = order[np.unique(tokens[order], return_index=True)[1]]  # (U,)
        return experts[torch.from_numpy(firsts).to(experts.device)]


def _round_down(n_tokens: int) -> int:
    """Round down to a multiple of `BUCKET`, or of a power of two that is an eighth to a quarter of a large number."""
    unit = max(BUCKET, 1 << max(0, abs(n_tokens).bit_length() - 3))
    return n_tokens // unit * unit


def sort_by_prefix(rows: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """Return the lexicographic order of rows of token ids, and how many tokens each shares with the row before it."""
    texts = [row.astype(">u4").tobytes() for row in rows]  # big-endian, so that bytes sort like numbers
    order = sorted(range(len(rows)), key=texts.__getitem__)
    return order, count_shared([rows[i] for i in order])


def count_shared(rows: Sequence[np.ndarray]) -> list[int]:
    """Return the length of the prefix that each row shares with the row before it."""
    n_shared = [0] * len(rows)
    for i, (last, row) in enumerate(pairwise(rows), start=1):
        n = min(len(last), len(row))
        different = np.flatnonzero(last[:n] != row[:n])
        n_shared[i] = int(different[0]) if len(different) else n
    return n_shared


def remove_padding(sequences: torch.Tensor, attention_mask: torch.Tensor) -> list[np.ndarray]:
    """Return the tokens (n,) of each row of (B, L)."""
    masks = attention_mask.cpu().numpy().astype(bool)
    return [row[mask] for row, mask in zip(sequences.cpu().numpy(), masks, strict=True)]


def tree_hidden_states(model: PreTrainedModel, tree: PrefixTree, group: SequenceGroup | None = None) -> torch.Tensor:
    """Return the final hidden states (M, H) of a tree's selected tokens, or (U, H) if all are selected.

    With `group`, return this rank's slice (u, H) of all tokens.
    """
    token_ids, position_ids = tree.token_ids, tree.position_ids
    if group is not None:
        token_ids, position_ids = group.take_slice(token_ids), group.take_slice(position_ids)
    is_narrowed = tree.selected is not None and is_narrow(model)
    with use_attention(model):
        output = model.base_model(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            prefix_tree=tree,
            sequence_group=group,
            **({"selected_tokens": tree.selected} if is_narrowed else {}),
        )
    states: torch.Tensor = output.last_hidden_state[0]
    return states if tree.selected is None or is_narrowed else states[tree.selected]


def use_attention(model: PreTrainedModel, name: str = NAME) -> AbstractContextManager[None]:
    """Switch a model to a registered attention function. Defaults to the one for prefix trees.

    With gradient checkpointing, the backward pass recomputes layers, so it must also run inside the context.
    """
    return with_attribute([model.config.get_text_config()], "_attn_implementation", name)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    prefix_tree: PrefixTree,
    sequence_group: SequenceGroup | None,
    wants_keys: bool = False,
    keys_and_values: tuple[torch.Tensor, torch.Tensor] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention (1, U, heads, d) of each token of a tree to itself and the tokens before it.

    Transformers defines the signature. `query` is (1, heads, U, d). With `sequence_group`, queries and results cover
    this rank's slice (u). With `keys_and_values` of all tokens, they cover the selected tokens (M).
    """
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with capped scores or sinks")
    if wants_keys:
        raise KeysAndValues(key, value)
    plan = prefix_tree.queries
    if keys_and_values is not None:
        plan, (key, value) = prefix_tree.selected_queries, keys_and_values
    queries, keys, values = (
        states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value)
    )  # (U or M, heads, d)
    if sequence_group is not None:
        n_tokens = len(prefix_tree.token_ids)
        queries, keys, values = sequence_group.tokens_to_heads(queries, keys, values, n_tokens)

    def rows(states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        flat = states.index_select(0, indices.flatten())
        return flat.view(*indices.shape, *states.shape[1:]).transpose(1, 2)  # (b, heads, T, d)

    outputs = []
    for bucket in plan.buckets:
        row_keys, row_values = rows(keys, bucket.keys), rows(values, bucket.keys)  # (b, key heads, L, d)
        for call in bucket.calls:
            mask = call.mask(sliding_window, values.dtype)  # (T, n_keys) or None
            attended = scaled_dot_product_attention(
                rows(queries, call.queries),
                row_keys[:, :, : call.n_keys],
                row_values[:, :, : call.n_keys],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=True,
            )  # (b, heads, T, d)
            outputs.append(attended.transpose(1, 2).flatten(0, 1))  # (b · T, heads, d)
    states = torch.cat(outputs).index_select(0, plan.outputs)  # (U or M, heads, d)
    if sequence_group is not None:
        states = sequence_group.heads_to_tokens(states)
    return states[None], None


AttentionInterface.register(NAME, _attend)


def find_mask_fault(config: PretrainedConfig) -> str | None:
    """Return why attention that masks by position and sliding window alone is wrong for a model, or None.

    The probes would fail, too, but could not give this reason.
    """
    if "chunked_attention" in (getattr(config.get_text_config(), "layer_types", None) or ()):
        return "its tokens attend only to their chunk"
    return None


def read_alone(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Return the hidden states (t, H) of a sequence without a cache, in float32."""
    output = model.base_model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False)
    return output.last_hidden_state[0].float()


@torch.no_grad()
@crossing_windows
def find_sharing_fault(model: PreTrainedModel, group: SequenceGroup | None = None) -> str | None:
    """Return why rows of a model cannot share prefixes, or None if they can.

    Some architectures mix neighboring tokens outside attention, e.g. with convolutions. So the test compares four short
    rows with the same rows computed separately. With `group`, its ranks split the tokens. If only the narrowed last
    layer changes hidden states, it is widened again and sharing stays on. Raise ConfigError if the ranks cannot split
    the heads.
    """
    if (mask_fault := find_mask_fault(model.config)) is not None:
        return mask_fault
    rows = [np.array(row) for row in ([1, 2, 3, 4, 5], [1, 2, 3, 6], [7, 2], [1, 2, 3, 4, 5, 6, 7, 8, 1])]
    expected = [read_alone(model, row.tolist()) for row in rows]
    tree = PrefixTree(rows, model.device)
    fault = _find_fault(model, tree, [tree.index[i, : len(row)] for i, row in enumerate(rows)], expected, group)
    if fault is None and group is None and is_narrow(model):
        selected = [(0, 2), (1, 3), (3, 3), (3, 8)]  # rows and positions
        tree = PrefixTree(rows, model.device, tuple(torch.tensor(selected).T))
        assert tree.selected is not None
        indices = [torch.searchsorted(tree.selected, tree.index[position]) for position in selected]
        if _find_fault(model, tree, indices, [expected[row][position] for row, position in selected]) is not None:
            widen_last_layer(model)
    return fault


def _find_fault(
    model: PreTrainedModel,
    tree: PrefixTree,
    indices: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    group: SequenceGroup | None = None,
) -> str | None:
    """Return how a tree's hidden states at the `indices` differ from the `expected` ones, or None if they agree."""
    tolerance = TOLERANCE if model.dtype == torch.float32 else LOW_PRECISION_TOLERANCE
    try:
        states = tree_hidden_states(model, tree, group).float()
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        return f"it fails with shared prefixes: {error}"
    if group is not None:
        states = group.gather(states, len(tree.token_ids))
    for index, row_states in zip(indices, expected, strict=True):
        difference = (states[index] - row_states).abs().max() / row_states.abs().max()
        if not difference < tolerance:
            return f"shared prefixes would change its hidden states by {difference:.1g}"
    return None
