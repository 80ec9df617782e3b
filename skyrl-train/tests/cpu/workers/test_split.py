from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.models.prefix_sharing import sort_by_prefix
from skyrl_train.types import TrainingBatch
from skyrl_train.workers.split import SHARED_COST, draws_fit, join, split

token_rows = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=20)
SPLITS: dict[str, st.SearchStrategy[Any]] = {
    "rows": token_rows,
    "n_ranks": st.integers(1, 4),
    "max_tokens": st.integers(1, 60),
    "max_rows": st.none() | st.integers(1, 5),
    "shares_prefixes": st.booleans(),
}


def make_batch(rows: list[list[int]]) -> TrainingBatch:
    """Return a batch whose rows train their last token, padded left to the longest."""
    length = max(map(len, rows))
    padded = torch.tensor([[9] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return TrainingBatch(padded, mask, torch.ones(len(rows), 1), draws=torch.arange(len(rows)))


def cost(rows: list[list[int]], shares_prefixes: bool) -> float:
    """Return the tokens of a micro-batch, with a discount for shared prefixes."""
    prefixes = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    n_tokens = sum(map(len, rows))
    return n_tokens - (1 - SHARED_COST) * (n_tokens - len(prefixes)) if shares_prefixes else n_tokens


@given(**SPLITS)
def test_a_split_is_a_partition_within_the_budget(
    rows: list[list[int]], n_ranks: int, max_tokens: int, max_rows: int | None, shares_prefixes: bool
) -> None:
    batch = make_batch(rows)
    shards, rows_of_rank = split(batch, n_ranks, max_tokens, max_rows, shares_prefixes=shares_prefixes)
    assert sorted(row for part in rows_of_rank for row in part) == list(range(len(rows)))
    assert len({len(shard.micro_batches) for shard in shards}) == 1
    for shard, own_rows in zip(shards, rows_of_rank, strict=True):
        assert torch.equal(shard.rows.sequences[: len(own_rows)], batch.sequences[own_rows])
        assert not shard.rows.loss_mask[len(own_rows) :].any()
        seen = [row for micro_batch in shard.micro_batches for row in micro_batch]
        assert [row for row in seen if row < len(own_rows)] == list(range(len(own_rows)))
        for micro_batch in shard.micro_batches:
            members = [rows[own_rows[row]] for row in micro_batch if row < len(own_rows)]
            assert cost(members, shares_prefixes) <= max_tokens or len(members) == 1
            assert max_rows is None or len(members) <= max_rows


@given(**SPLITS, draw_size=st.integers(1, 4))
def test_the_rows_of_a_draw_stay_together(
    rows: list[list[int]], draw_size: int, n_ranks: int, max_tokens: int, max_rows: int | None, shares_prefixes: bool
) -> None:
    batch = make_batch(rows)
    batch.draws = torch.arange(len(rows)) // draw_size
    draws = [range(len(rows))[start : start + draw_size] for start in range(0, len(rows), draw_size)]
    sizes = [sum(len(rows[row]) for row in draw) for draw in draws]
    fits = max(sizes) <= max_tokens and (max_rows is None or max(map(len, draws)) <= max_rows)
    assert draws_fit(batch, max_tokens, max_rows) == fits
    shards, rows_of_rank = split(
        batch, n_ranks, max_tokens, max_rows, shares_prefixes=shares_prefixes, keeps_draws=True
    )
    assert sorted(row for part in rows_of_rank for row in part) == list(range(len(rows)))
    for shard, own_rows in zip(shards, rows_of_rank, strict=True):
        for micro_batch in shard.micro_batches:
            members = [own_rows[row] for row in micro_batch if row < len(own_rows)]
            parts = [draw for draw in draws if draw[0] in members]
            parts.sort(key=lambda draw: members.index(draw[0]))
            assert [row for draw in parts for row in draw] == members
            if fits:
                assert cost([rows[row] for row in members], shares_prefixes) <= max_tokens
                assert max_rows is None or len(members) <= max_rows


@given(rows=token_rows, n_ranks=st.integers(1, 4))
def test_scores_return_to_their_rows(rows: list[list[int]], n_ranks: int) -> None:
    batch = make_batch(rows)
    shards, rows_of_rank = split(batch, n_ranks, 10)
    scores = [{"logprobs": shard.rows.sequences[:, -1:].float()} for shard in shards]
    joined = join(rows_of_rank, scores, len(batch))
    assert torch.equal(joined["logprobs"], batch.sequences[:, -1:].float())


def test_ranks_get_equal_costs_and_groups_stay_together() -> None:
    prompts = ([1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2])
    rows = [[*prompts[i % 2], i] for i in range(8)]  # two groups, interleaved
    _, rows_of_rank = split(make_batch(rows), 2, 100, shares_prefixes=True)
    assert rows_of_rank == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_micro_batches_have_about_equal_sizes() -> None:
    shards, _ = split(make_batch([[i, *range(9)] for i in range(11)]), 1, max_tokens=100)
    assert [len(rows) for rows in shards[0].micro_batches] == [7, 4]


def test_rows_without_trained_tokens_are_left_out() -> None:
    batch = make_batch([[1, 2], [3, 4], [5, 6]])
    batch.loss_mask[1] = 0
    (shard,), rows_of_rank = split(batch, 1, 100)
    assert rows_of_rank == [[0, 2]]
    assert len(shard.rows) == 2
    batch.loss_mask[:] = 0
    (shard,), rows_of_rank = split(batch, 1, 100)
    assert (rows_of_rank, shard.micro_batches) == ([[]], [])


@given(rows=token_rows)
def test_rows_are_sorted_by_their_tokens(rows: list[list[int]]) -> None:
    order, n_shared = sort_by_prefix([np.array(row) for row in rows])
    ordered = [rows[i] for i in order]
    assert ordered == sorted(rows)
    for i, n in enumerate(n_shared):
        last = ordered[i - 1] if i else []
        assert ordered[i][:n] == last[:n]
        assert n == min(len(last), len(ordered[i])) or ordered[i][n] != last[n]
