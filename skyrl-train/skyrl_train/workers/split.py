"""The division of a batch among data-parallel ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl_train.models.prefix_sharing import sort_by_prefix, unpadded
from skyrl_train.types import Shard, TrainingBatch

SHARED_COST = 0.25
"""Cost of a token that an earlier row of the micro-batch shares, relative to a new one: only attention reads it."""


def split(
    batch: TrainingBatch, n_ranks: int, max_tokens: int, max_rows: int | None = None, *, shares_prefixes: bool = False
) -> tuple[list[Shard], list[list[int]]]:
    """Return a shard for each of `n_ranks` ranks, and the rows of the batch that it begins with.

    Rows that have a trained token are sorted by their tokens, so that rows with a common prefix are adjacent. Ranks,
    and the micro-batches of a rank, take consecutive rows: ranks of equal cost, micro-batches of at most `max_tokens`
    tokens and `max_rows` rows, but at least one row. With `shares_prefixes`, tokens of a prefix that a micro-batch
    contains already count as `SHARED_COST`. Every rank gets the same number of micro-batches: fillers, copies of the
    batch's shortest row with its loss mask zeroed, make up the difference.
    """
    trained = batch.loss_mask.any(dim=1).nonzero()[:, 0].tolist()
    tokens = unpadded(batch.sequences[trained], batch.attention_mask[trained])
    order, n_shared = sort_by_prefix(tokens)
    lengths = [len(tokens[i]) for i in order]
    saved = [(1 - SHARED_COST) * n if shares_prefixes else 0.0 for n in n_shared]
    rows_of_rank: list[list[int]] = [[] for _ in range(n_ranks)]
    micro_batches_of_rank: list[list[list[int]]] = [[] for _ in range(n_ranks)]
    total, cost, load = sum(lengths) - sum(saved), 0.0, 0.0
    for i, (length, saving) in enumerate(zip(lengths, saved, strict=True)):
        rank = min(int(cost / total * n_ranks), n_ranks - 1)
        cost += length - saving
        rows, micro_batches = rows_of_rank[rank], micro_batches_of_rank[rank]
        if not micro_batches or load + length - saving > max_tokens or len(micro_batches[-1]) == max_rows:
            micro_batches.append([])
            load = saving
        micro_batches[-1].append(len(rows))
        load += length - saving
        rows.append(trained[order[i]])

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


def join(
    split_rows: Sequence[Sequence[int]], parts: Sequence[dict[str, torch.Tensor]], n_rows: int
) -> dict[str, torch.Tensor]:
    """Put the scores (b, R) of each rank's rows at their rows of the batch (B, R); other rows are 0."""
    joined: dict[str, torch.Tensor] = {}
    for rows, scores in zip(split_rows, parts, strict=True):
        for name, values in scores.items():
            whole = joined.setdefault(name, values.new_zeros(n_rows, values.shape[1]))
            whole[list(rows)] = values[: len(rows)]
    return joined
