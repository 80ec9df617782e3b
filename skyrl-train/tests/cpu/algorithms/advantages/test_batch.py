"""Normalisation over the whole batch."""

from __future__ import annotations

import math

import pytest
import torch

from skyrl_train.algorithms.advantages import normalize_over_batch


def test_by_hand_and_padding_has_no_say() -> None:
    advantages = torch.tensor([[1.0, 2.0, math.nan], [6.0, 100.0, -5.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    normalised = normalize_over_batch(advantages, mask)
    scale = math.sqrt(14 / 3)  # mean 3, mean square (4 + 1 + 9) / 3
    assert normalised[0].tolist() == pytest.approx([-2 / scale, -1 / scale, 0])
    assert normalised[1].tolist() == pytest.approx([3 / scale, 0, 0])


def test_a_variance_below_1e_8_counts_as_1e_8() -> None:
    advantages = torch.tensor([[0.0, 2e-6]], dtype=torch.float64)
    assert normalize_over_batch(advantages, torch.ones(1, 2))[0].tolist() == pytest.approx([-0.01, 0.01])


def test_nothing_to_normalise_stays_zero() -> None:
    assert not normalize_over_batch(torch.full((2, 2), 0.5), torch.ones(2, 2)).any()
    assert not normalize_over_batch(torch.full((2, 2), math.nan), torch.zeros(2, 2)).any()
