"""Ratios by hand, and that none overflows."""

from __future__ import annotations

import math

import pytest
import torch

from skyrl_train.algorithms.losses import importance_ratio, sequence_ratio


def test_the_ratio_of_a_token_never_overflows() -> None:
    log_probs = torch.tensor([0.0, -500.0, math.log(3.0)])
    ratio = importance_ratio(log_probs, torch.tensor([-500.0, 0.0, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20), 3.0])


def test_the_ratio_of_a_trajectory_is_the_geometric_mean_over_its_trained_tokens() -> None:
    log_ratio = torch.tensor([[0.1, 0.3, 9.0], [math.log(2.0), 9.0, math.log(8.0)], [math.nan, 9.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assert sequence_ratio(log_ratio, mask).squeeze(-1).tolist() == pytest.approx([1.221403, 4.0, 1.0])


def test_the_ratio_of_a_trajectory_never_overflows() -> None:
    ratio = sequence_ratio(torch.tensor([[500.0, 500.0], [-500.0, -500.0]]), torch.ones(2, 2))
    assert ratio.squeeze(-1).tolist() == pytest.approx([math.exp(10), 0.0])
