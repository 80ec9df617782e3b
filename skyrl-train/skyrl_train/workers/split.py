"""The division of a batch among data-parallel ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyrl_train.dataset.batch import micro_batches
from skyrl_train.types import Shard, TrainingBatch


def split(
    batch: TrainingBatch, n_ranks: int, max_tokens: int, max_rows: int | None = None
) -> tuple[list[Shard], list[list[int]]]:
    """Return a shard for each of `n_ranks` ranks, and the rows of the batch that it begins with.

    The rows that have a trained token are divided among the ranks, and those of each rank into micro-batches.
    The longest rows are dealt first, each to the rank with the fewest tokens. Every rank gets the same number of
    micro-batches: fillers, copies of the batch's shortest row with its loss mask zeroed, make up the difference.
    """
    lengths = batch.attention_mask.sum(dim=1).tolist()
    trained = batch.loss_mask.any(dim=1).nonzero()[:, 0].tolist()
    rows_of_rank = _deal(trained, lengths, n_ranks)
    parts = [micro_batches([lengths[row] for row in rows], max_tokens, max_rows) for rows in rows_of_rank]
    n_micro_batches = max(map(len, parts))
    shortest = min(trained, key=lambda row: lengths[row]) if trained else 0
    shards = []
    for rows, own_parts in zip(rows_of_rank, parts, strict=True):
        n_fillers = n_micro_batches - len(own_parts)
        shard = batch.select([*rows, *([shortest] if n_fillers else [])])
        if n_fillers:
            for tensor in (shard.loss_mask, shard.loss_weights, shard.sequence_weights, shard.logprob_gradient):
                if tensor is not None:
                    tensor[len(rows) :] = 0
        shards.append(Shard(shard, [*own_parts, *([[len(rows)]] * n_fillers)]))
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


def _deal(trained: Sequence[int], lengths: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Return the rows of each rank, ascending."""
    rows: list[list[int]] = [[] for _ in range(n_ranks)]
    loads = [0] * n_ranks
    for row in sorted(trained, key=lambda row: -lengths[row]):
        rank = min(range(n_ranks), key=lambda rank: (loads[rank], len(rows[rank])))
        rows[rank].append(row)
        loads[rank] += lengths[row]
    return [sorted(of_rank) for of_rank in rows]
