"""One divisor for the whole mini-batch: splitting the work never changes the loss."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.kl import approximate_kl
from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.algorithms.reduction import LossReduction, token_weights, weighted_sum
from skyrl_train.config.algorithm import AlgorithmConfig

MASK = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
VALUES = torch.tensor([[1.0, 2.0, 100.0, 3.0], [100.0, 10.0, 100.0, 100.0]])
REDUCTIONS: tuple[LossReduction, ...] = get_args(LossReduction)


@pytest.mark.parametrize(
    ("reduction", "loss", "sum_of_weights"),
    [
        ("token_mean", (1 + 2 + 3 + 10) / 4, 1.0),
        ("sequence_mean", (2 + 10) / 2, 1.0),
        ("seq_mean_token_sum_norm", (6 / 8 + 10 / 8) / 2, 4 / 16),
    ],
)
def test_by_hand(reduction: LossReduction, loss: float, sum_of_weights: float) -> None:
    weights = token_weights(MASK, reduction, max_seq_len=8)
    assert weighted_sum(VALUES, weights).item() == pytest.approx(loss)
    assert weights.sum().item() == pytest.approx(sum_of_weights)
    assert (weights[MASK == 0] == 0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_mask_without_tokens_is_a_loss_of_zero(reduction: LossReduction) -> None:
    assert weighted_sum(VALUES, token_weights(torch.zeros_like(MASK), reduction, max_seq_len=8)) == 0


def test_max_seq_len_is_needed_where_it_is_the_divisor() -> None:
    with pytest.raises(AssertionError, match="max_seq_len"):
        token_weights(MASK, "seq_mean_token_sum_norm")


@given(
    mask=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8),
    part_size=st.integers(1, 8),
    reduction=st.sampled_from(REDUCTIONS),
)
def test_splitting_the_rows_gives_the_same_loss_and_gradient(
    mask: list[list[bool]], part_size: int, reduction: LossReduction
) -> None:
    loss_mask = torch.tensor(mask, dtype=torch.float64)
    values = torch.arange(loss_mask.numel(), dtype=torch.float64).reshape(loss_mask.shape).requires_grad_()
    weights = token_weights(loss_mask, reduction, max_seq_len=8)
    whole = weighted_sum(values, weights)
    parts = [
        weighted_sum(some_values, some_weights)
        for some_values, some_weights in zip(values.split(part_size), weights.split(part_size), strict=True)
    ]
    torch.testing.assert_close(sum(parts), whole)
    for part in parts:
        part.backward()
    torch.testing.assert_close(values.grad, weights)


def test_a_nan_under_the_mask_stays_there() -> None:
    weights = token_weights(MASK, "token_mean")
    values = VALUES.where(MASK > 0, math.nan).requires_grad_()
    loss = weighted_sum(values, weights)
    loss.backward()
    assert loss.item() == 4.0
    torch.testing.assert_close(values.grad, weights)


def test_a_nan_under_the_mask_reaches_no_gradient_through_the_whole_loss() -> None:
    nan_outside = torch.zeros_like(MASK).where(MASK > 0, math.nan)
    log_probs = (VALUES / -50).requires_grad_()
    loss, _ = clipped_surrogate(
        log_probs, VALUES / -40 + nan_outside, 1 + nan_outside, AlgorithmConfig(), MASK, nan_outside
    )
    kl = approximate_kl(log_probs, VALUES / -45 + nan_outside, "k3")
    weights = token_weights(MASK, "token_mean")
    (weighted_sum(loss, weights) + weighted_sum(kl, weights)).backward()
    assert log_probs.grad is not None
    on_mask = log_probs.grad[MASK > 0]
    assert on_mask.isfinite().all()
    assert (on_mask != 0).any()
