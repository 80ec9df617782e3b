from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.types import TrainingBatch
from skyrl_train.types.batch import TENSOR_FIELDS


def batch_of(draws: list[int], length: int = 5, response_length: int = 3, **computed: torch.Tensor) -> TrainingBatch:
    """Return a batch in which every number is row · 100 + column."""

    def numbers(n_columns: int) -> torch.Tensor:
        return torch.arange(len(draws))[:, None] * 100 + torch.arange(n_columns)

    return TrainingBatch(
        sequences=numbers(length),
        attention_mask=torch.ones(len(draws), length, dtype=torch.long),
        loss_mask=torch.ones(len(draws), response_length),
        rewards=numbers(response_length).float(),
        rollout_logprobs=-numbers(response_length).float(),
        draws=torch.tensor(draws),
        **computed,
    )


def assert_same(actual: TrainingBatch, expected: TrainingBatch) -> None:
    for name in TENSOR_FIELDS:
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draws": torch.zeros(1)}, r"draws: \(1,\)"),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask: \(2, 4\)"),
        ({"loss_mask": torch.ones(1, 3)}, r"loss_mask: \(1, 3\)"),
        ({"rewards": torch.ones(2, 2)}, r"rewards: \(2, 2\)"),
        ({"rollout_logprobs": torch.ones(2, 5)}, r"rollout_logprobs: \(2, 5\)"),
        ({"advantages": torch.ones(2)}, r"advantages: \(2,\)"),
        (
            {"sequences": torch.ones(2, 2), "attention_mask": torch.ones(2, 2)},
            "responses of 3 tokens in sequences of 2",
        ),
    ],
)
def test_a_batch_refuses_tensors_of_inconsistent_shapes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        replace(batch_of([0, 1]), **change)


def test_select_returns_the_given_rows_and_does_not_change_the_batch() -> None:
    batch = batch_of([0, 1, 2], values=torch.arange(9.0).reshape(3, 3))
    selected = batch.select([2, 0])
    assert selected.draws.tolist() == [2, 0]
    assert selected.sequences[:, 0].tolist() == [200, 0]
    assert selected.rollout_logprobs[:, 1].tolist() == [-201, -1]
    assert selected.values.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert selected.advantages is None
    selected.rewards.zero_()
    assert batch.rewards[2, 0] == 200


def test_to_moves_every_tensor() -> None:
    moved = batch_of([0, 1], returns=torch.ones(2, 3)).to("meta")
    tensors = {name: getattr(moved, name) for name in TENSOR_FIELDS if getattr(moved, name) is not None}
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    assert len(tensors) == 7
    assert moved.values is None


@given(
    group_sizes=st.lists(st.integers(min_value=1, max_value=4), min_size=1, max_size=6),
    n_prompts=st.integers(min_value=1, max_value=7),
)
def test_chunks_are_consecutive_rows_of_the_batch(group_sizes: list[int], n_prompts: int) -> None:
    draws = [group for group, size in enumerate(group_sizes) for _ in range(size)]
    batch = batch_of(draws, old_logprobs=torch.rand(len(draws), 3))
    parts = batch.chunk(n_prompts)
    for end, part in zip(accumulate(map(len, parts)), parts, strict=True):
        assert_same(part, batch.select(list(range(end - len(part), end))))
    assert sum(map(len, parts)) == len(batch)
    assert all(len(set(part.draws.tolist())) == n_prompts for part in parts[:-1])
    assert not any(set(left.draws.tolist()) & set(right.draws.tolist()) for left, right in pairwise(parts))


def test_a_batch_needs_no_rewards() -> None:
    """A batch of supervised rows has no rewards."""
    batch = replace(batch_of([0, 0, 1]), rewards=None, rollout_logprobs=None)
    assert [part.rewards for part in batch.chunk(1)] == [None, None]
    assert batch.select([0]).to("cpu").rewards is None
