"""Split a batch over data-parallel ranks and micro-batches."""

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from skyrl_train.models.prefix_sharing import SHARED_COST, count_shared, remove_padding, sort_by_prefix
from skyrl_train.types import Shard, TrainingBatch


def split(
    batch: TrainingBatch,
    n_ranks: int,
    max_tokens: int,
    max_rows: int | None = None,
    *,
    shares_prefixes: bool = False,
    keeps_draws: bool = False,
) -> tuple[list[Shard], list[list[int]]]:
    """Return a shard for each of `n_ranks` ranks, and the rows of the batch that the shard starts with.

    Only rows with a trained token count. They are sorted by their token ids, so rows with a common prefix are adjacent.
    Then ranks take consecutive rows of about equal total cost, and the micro-batches of a rank take consecutive rows of
    the rank, at most `max_tokens` tokens and `max_rows` rows, but at least one row.

    With `shares_prefixes`, a token costs `SHARED_COST` instead of 1 if it is in a prefix that the micro-batch already
    has. For example, two prompts of 60 tokens are sampled twice each, and all four rows have 100 tokens. The second row
    of a prompt costs 40 + 0.25 · 60 = 55, so on 2 ranks, each rank gets one prompt (cost 155). With `max_tokens` = 200,
    it is one micro-batch. With 100 it is two, and the second micro-batch computes the prompt again, at full cost. Rows
    with images share nothing.

    With `keeps_draws`, all rows of a draw are in one micro-batch, in their order, whatever the limits (`draws_fit`).

    Every rank gets the same number of micro-batches, because each of them runs collectives. Ranks with fewer get
    fillers: copies of the batch's shortest row with loss mask 0.
    """
    trained = batch.loss_mask.any(dim=1).nonzero()[:, 0].tolist()
    tokens = remove_padding(batch.sequences[trained], batch.attention_mask[trained])
    order, n_shared = sort_by_prefix(tokens)
    units = [[i] for i in range(len(order))]  # rows that stay together, as indices into the order
    if keeps_draws:
        order, n_shared, units = _join_draws(order, tokens, batch.draws[trained].tolist())
    lengths = [len(tokens[i]) for i in order]
    shares_prefixes = shares_prefixes and batch.images is None
    saved = [(1 - SHARED_COST) * n if shares_prefixes else 0.0 for n in n_shared]
    rows_of_rank: list[list[int]] = [[] for _ in range(n_ranks)]
    micro_batches_of_rank: list[list[list[int]]] = [[] for _ in range(n_ranks)]
    total, cost, load = sum(lengths) - sum(saved), 0.0, 0.0
    # As few micro-batches as fit, of about equal size: with max_tokens 900, 50 rows of 20 tokens become 27 + 23 rows,
    # not 45 + 5. The slack of two rows is for rows that cannot be cut, at the end of a micro-batch and of a rank.
    n_needed = math.ceil(total / n_ranks / max_tokens)
    limit = min(max_tokens, total / n_ranks / max(1, n_needed) + 2 * max(lengths, default=0))
    for unit in units:
        rank = min(int(cost / total * n_ranks), n_ranks - 1)
        rows, micro_batches = rows_of_rank[rank], micro_batches_of_rank[rank]
        n_new = sum(lengths[i] - saved[i] for i in unit)
        cost += n_new
        if (
            not micro_batches
            or load + n_new > limit
            or (max_rows is not None and len(micro_batches[-1]) + len(unit) > max_rows)
        ):
            micro_batches.append([])
            load = saved[unit[0]]  # the first row of a micro-batch shares nothing, so it costs its full length
        load += n_new
        micro_batches[-1] += range(len(rows), len(rows) + len(unit))
        rows += [trained[order[i]] for i in unit]

    n_micro_batches = max(map(len, micro_batches_of_rank))
    shortest = trained[min(range(len(trained)), key=lambda i: len(tokens[i]))] if trained else 0
    shards = []
    for rows, micro_batches in zip(rows_of_rank, micro_batches_of_rank, strict=True):
        n_fillers = n_micro_batches - len(micro_batches)
        shard = batch.select([*rows, *([shortest] if n_fillers else [])])
        if n_fillers:
            for tensor in (shard.loss_mask, shard.loss_weights, shard.sequence_weights, shard.logprob_gradient):
                if tensor is not None:
                    tensor[len(rows) :] = 0
        shards.append(Shard(shard, [*micro_batches, *([[len(rows)]] * n_fillers)]))
    return shards, rows_of_rank


def _join_draws(
    order: Sequence[int], tokens: Sequence[np.ndarray], draws: Sequence[int]
) -> tuple[list[int], list[int], list[list[int]]]:
    """Move all rows of a draw next to its first row in an order.

    Return the new order, the number of tokens that each row shares with the row before, and the indices of each draw.
    """
    first: dict[int, int] = {}
    for position, row in enumerate(order):
        first.setdefault(draws[row], position)
    order = sorted(order, key=lambda row: (first[draws[row]], row))
    units = [list(unit) for _, unit in groupby(range(len(order)), key=lambda i: draws[order[i]])]
    return order, count_shared([tokens[row] for row in order]), units


def draws_fit(batch: TrainingBatch, max_tokens: int, max_rows: int | None) -> bool:
    """Return True if every draw has at most `max_tokens` tokens and `max_rows` rows."""
    _, draws = batch.draws.unique(return_inverse=True)
    n_tokens = torch.bincount(draws, batch.attention_mask.sum(dim=1))
    n_rows = torch.bincount(draws)
    return bool((n_tokens <= max_tokens).all()) and (max_rows is None or bool((n_rows <= max_rows).all()))


def join(
    split_rows: Sequence[Sequence[int]], parts: Sequence[dict[str, torch.Tensor]], n_rows: int
) -> dict[str, torch.Tensor]:
    """Put each rank's scores (b, R) at their rows of the batch (B, R). Rows without scores are 0."""
    joined: dict[str, torch.Tensor] = {}
    for rows, scores in zip(split_rows, parts, strict=True):
        for name, values in scores.items():
            whole = joined.setdefault(name, values.new_zeros(n_rows, values.shape[1]))
            whole[list(rows)] = values[: len(rows)]
    return joined


def measure_padding(shards: Sequence[Shard]) -> float:
    """Return the share of padding if the rows of each micro-batch are padded to the longest."""
    n_tokens = n_computed = 0
    for shard in shards:
        lengths = shard.rows.attention_mask.sum(dim=1)
        for indices in shard.micro_batches:
            n_tokens += int(lengths[indices].sum())
            n_computed += len(indices) * int(lengths[indices].max())
    return (n_computed - n_tokens) / max(1, n_computed)
