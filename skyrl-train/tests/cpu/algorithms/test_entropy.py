import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.entropy import top_entropy_mask

ENTROPIES = torch.tensor([[0.1, 0.9, math.nan, 0.5], [0.3, 9.0, 0.7, 0.2]])
TRAINED = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0]])


@pytest.mark.parametrize(
    ("quantile", "kept"),
    [
        (0.01, [[0, 1, 0, 0], [0, 0, 0, 0]]),  # at least one
        (1 / 6, [[0, 1, 0, 0], [0, 0, 0, 0]]),
        (0.2, [[0, 1, 0, 0], [0, 0, 1, 0]]),  # 1.2 of six tokens: two
        (0.5, [[0, 1, 0, 1], [0, 0, 1, 0]]),
        (1.0, [[1, 1, 0, 1], [1, 0, 1, 1]]),
    ],
)
def test_the_tokens_with_the_highest_entropy_are_kept(quantile: float, kept: list[list[int]]) -> None:
    assert top_entropy_mask(ENTROPIES, TRAINED, quantile).tolist() == kept


def test_ties_are_kept_together() -> None:
    entropies = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]])
    assert top_entropy_mask(entropies, torch.ones(1, 5), 0.4).tolist() == [[1, 1, 1, 1, 0]]


def test_a_quantile_of_exactly_n_tokens_keeps_n_tokens() -> None:
    for n_tokens in range(1, 60):
        for n_kept in range(1, n_tokens + 1):
            mask = top_entropy_mask(torch.arange(n_tokens)[None] / 8, torch.ones(1, n_tokens), n_kept / n_tokens)
            assert mask.sum() == n_kept


def test_an_empty_mask_stays_empty() -> None:
    assert not top_entropy_mask(ENTROPIES, torch.zeros(2, 4), 0.5).any()


def test_the_entropy_mask_is_detached() -> None:
    assert not top_entropy_mask(torch.rand(2, 3, requires_grad=True), torch.ones(2, 3), 0.5).requires_grad


@given(
    entropies=st.lists(st.floats(0, 5, width=32), min_size=1, max_size=24, unique=True),
    quantile=st.floats(0.01, 1),
    data=st.data(),
)
def test_neither_order_nor_padding_matters(entropies: list[float], quantile: float, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(entropies))))
    row = torch.tensor(entropies)
    expected = top_entropy_mask(row[None], torch.ones(1, len(row)), quantile)[0]
    column = torch.cat([row[order], torch.full((3,), 99.0)])[:, None]
    mask = torch.cat([torch.ones(len(row)), torch.zeros(3)])[:, None]
    kept = top_entropy_mask(column, mask, quantile)[:, 0]
    assert torch.equal(kept[: len(row)], expected[order])
    assert not kept[len(row) :].any()
    assert row[expected > 0].min() > row[expected == 0].max() if (expected == 0).any() else True
