import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.masked import masked_mean, masked_var, masked_whiten, normalize_over_batch, top_entropy_mask

NAN = math.nan
VALUES = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)


def test_the_mean_is_over_the_masked_values() -> None:
    assert masked_mean(VALUES, MASK).item() == 3
    assert masked_mean(VALUES, MASK, dim=-1).tolist() == [1.5, 6]
    assert masked_mean(VALUES, MASK, dim=0).tolist() == [3.5, 2, 0]  # the mask of the last column is empty


def test_fewer_than_two_values_are_only_centred() -> None:
    values, empty = torch.tensor([[0.3, NAN]]), torch.zeros(1, 2)
    assert masked_whiten(values, torch.tensor([[1.0, 0.0]])).tolist() == [[0, 0]]
    assert masked_whiten(values, empty).tolist() == [[0, 0]]
    assert masked_var(values, empty).item() == masked_mean(values, empty).item() == 0


@pytest.mark.parametrize("value", [0.1, -0.7, 1 / 3])
def test_equal_values_are_whitened_to_zero_at_any_count(value: float) -> None:
    """The rounding error of the mean, multiplied by 1 / √1e-8, would be an advantage of 1e-3."""
    for n in (3, 1000, 99_991):
        values = torch.full((1, n), value)
        assert masked_whiten(values, torch.ones_like(values)).abs().max() < 1e-7


@given(st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=1, max_size=9))
def test_statistics_equal_those_of_torch_on_the_masked_values(cells: list[tuple[float, bool]]) -> None:
    values = torch.tensor([value for value, _ in cells], dtype=torch.float64)
    mask = torch.tensor([is_selected for _, is_selected in cells])
    selected = values[mask]
    poisoned = torch.where(mask, values, NAN)
    whitened = masked_whiten(poisoned, mask)
    assert (whitened[~mask] == 0).all()
    if len(selected):
        assert masked_mean(poisoned, mask).item() == pytest.approx(selected.mean().item(), abs=1e-12)
    if len(selected) > 1:
        assert masked_var(poisoned, mask).item() == pytest.approx(selected.var().item(), abs=1e-12)
        torch.testing.assert_close(whitened[mask], (selected - selected.mean()) / (selected.var() + 1e-8).sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.long, torch.float32])
def test_the_dtype_of_the_values_is_kept_for_any_mask_dtype(dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    values, mask = VALUES.to(dtype), MASK.to(mask_dtype)
    for result in (masked_mean(values, mask), masked_var(values, mask), masked_whiten(values, mask)):
        assert result.dtype == dtype


def test_normalization_by_hand_ignores_padding() -> None:
    advantages = torch.tensor([[1.0, 2.0, math.nan], [6.0, 100.0, -5.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    normalized = normalize_over_batch(advantages, mask)
    scale = math.sqrt(14 / 3)  # mean 3, mean square (4 + 1 + 9) / 3
    assert normalized[0].tolist() == pytest.approx([-2 / scale, -1 / scale, 0])
    assert normalized[1].tolist() == pytest.approx([3 / scale, 0, 0])


def test_a_small_variance_is_raised_and_an_empty_mask_is_normalized_to_zero() -> None:
    advantages = torch.tensor([[0.0, 2e-6]], dtype=torch.float64)
    assert normalize_over_batch(advantages, torch.ones(1, 2))[0].tolist() == pytest.approx([-0.01, 0.01])  # to 1e-8
    assert not normalize_over_batch(torch.full((2, 2), 0.5), torch.ones(2, 2)).any()
    assert not normalize_over_batch(torch.full((2, 2), math.nan), torch.zeros(2, 2)).any()


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


def test_ties_are_kept_together_and_the_mask_is_detached() -> None:
    entropies = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]], requires_grad=True)
    kept = top_entropy_mask(entropies, torch.ones(1, 5), 0.4)
    assert kept.tolist() == [[1, 1, 1, 1, 0]]
    assert not kept.requires_grad
    assert not top_entropy_mask(ENTROPIES, torch.zeros(2, 4), 0.5).any(), "an empty mask stays empty"


def test_a_quantile_of_exactly_n_tokens_keeps_n_tokens() -> None:
    for n_tokens in range(1, 60):
        for n_kept in range(1, n_tokens + 1):
            mask = top_entropy_mask(torch.arange(n_tokens)[None] / 8, torch.ones(1, n_tokens), n_kept / n_tokens)
            assert mask.sum() == n_kept


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
