import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.reduction import token_weights, weighted_sum
from skyrl_train.compat.skyrl.algorithms import reduce_loss
from skyrl_train.config.algorithm import LossReduction
from skyrl_train.errors import ConfigError

MASK = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
VALUES = torch.tensor(
    [[1.0, 2.0, 99.0, 3.0], [99.0, 10.0, 99.0, 99.0], [4.0, 6.0, 99.0, 99.0], [99.0, 99.0, 99.0, 99.0]]
)
INDEX = ["a", "a", "b", "c"]  # c has no trained tokens
REDUCTIONS: tuple[LossReduction, ...] = get_args(LossReduction)


@pytest.mark.parametrize(
    ("reduction", "loss", "sum_of_weights"),
    [
        ("token_mean", (1 + 2 + 3 + 10 + 4 + 6) / 6, 1.0),
        ("sequence_mean", (2 + 10 + 5) / 3, 1.0),
        ("prompt_mean", ((1 + 2 + 3 + 10) / 4 + (4 + 6) / 2) / 2, 1.0),
        ("seq_mean_token_sum_norm", (6 / 8 + 10 / 8 + 10 / 8) / 3, 6 / 24),
        ("seq_mean_token_sum", (6 + 10 + 10) / 3, 6 / 3),
        ("token_sum", 26, 6),
    ],
)
def test_by_hand(reduction: LossReduction, loss: float, sum_of_weights: float) -> None:
    weights = token_weights(MASK, reduction, max_seq_len=8, index=INDEX)
    assert weighted_sum(VALUES, weights).item() == pytest.approx(loss)
    assert weights.sum().item() == pytest.approx(sum_of_weights)
    assert (weights[MASK == 0] == 0).all()
    assert reduce_loss(VALUES, MASK, reduction, 8, INDEX).item() == pytest.approx(loss)
    assert reduce_loss(VALUES, MASK.bool(), reduction, 8, INDEX).item() == pytest.approx(loss)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_mask_without_tokens_is_a_loss_of_zero_and_no_mask_a_mask_of_ones(reduction: LossReduction) -> None:
    assert weighted_sum(VALUES, token_weights(torch.zeros_like(MASK), reduction, max_seq_len=8, index=INDEX)) == 0
    assert reduce_loss(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), None, "token_mean").item() == 3.0


def test_missing_inputs_of_a_reduction_are_named() -> None:
    with pytest.raises(ConfigError, match="needs max_seq_len"):
        token_weights(MASK, "seq_mean_token_sum_norm")
    with pytest.raises(ConfigError, match="needs index"):
        reduce_loss(VALUES, MASK, "prompt_mean")
    with pytest.raises(ConfigError, match="unknown loss reduction 'mean'"):
        token_weights(MASK, "mean")  # type: ignore[arg-type]


MaskedValues = tuple[torch.Tensor, torch.Tensor, list[str]]
masks = st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8)


@st.composite
def batches(draw: st.DrawFn) -> MaskedValues:
    """A mask (B, 3), values (B, 3) and prompts [B] whose rows need not be contiguous."""
    mask = torch.tensor(draw(masks), dtype=torch.float64)
    values = torch.arange(mask.numel(), dtype=torch.float64).reshape(mask.shape) - 4
    index = draw(st.lists(st.sampled_from("abc"), min_size=len(mask), max_size=len(mask)))
    return mask, values, index


@given(batch=batches(), part_size=st.integers(1, 8), reduction=st.sampled_from(REDUCTIONS))
def test_splitting_the_rows_gives_the_same_loss_and_gradient(
    batch: MaskedValues, part_size: int, reduction: LossReduction
) -> None:
    mask, values, index = batch
    values.requires_grad_()
    weights = token_weights(mask, reduction, max_seq_len=8, index=index)
    whole = weighted_sum(values, weights)
    parts = [
        weighted_sum(part_values, part_weights)
        for part_values, part_weights in zip(values.split(part_size), weights.split(part_size), strict=True)
    ]
    torch.testing.assert_close(sum(parts), whole)
    for part in parts:
        part.backward()
    torch.testing.assert_close(values.grad, weights)


@given(batch=batches(), reduction=st.sampled_from(REDUCTIONS), data=st.data())
def test_neither_padding_nor_order_matters(batch: MaskedValues, reduction: LossReduction, data: st.DataObject) -> None:
    mask, _, index = batch
    order = data.draw(st.permutations(range(len(index))))
    padding = torch.zeros(len(index), 2, dtype=torch.float64)
    weights = token_weights(
        torch.cat([mask, padding], dim=1)[order], reduction, max_seq_len=8, index=[index[row] for row in order]
    )
    expected = token_weights(mask, reduction, max_seq_len=8, index=index)
    torch.testing.assert_close(weights, torch.cat([expected, padding], dim=1)[order], atol=1e-6, rtol=0)


def test_a_nan_under_the_mask_does_not_reach_the_loss_or_gradient() -> None:
    weights = token_weights(MASK, "token_mean")
    values = VALUES.where(MASK > 0, math.nan).requires_grad_()
    loss = weighted_sum(values, weights)
    loss.backward()
    assert loss.item() == pytest.approx(26 / 6)
    torch.testing.assert_close(values.grad, weights)
