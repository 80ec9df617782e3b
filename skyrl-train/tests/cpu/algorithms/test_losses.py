"""The clipped loss and its gradient, token by token, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from skyrl_train.algorithms.losses import clipped_surrogate, importance_ratio
from skyrl_train.config.algorithm import AlgorithmConfig

CONFIG = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [  # the gradient of -ρA in log π is -ρA; the clipped branch has none
        (0.5, 2.0, -1.0, -1.0, False),  # a good token that became rarer is still pulled up
        (0.5, -2.0, 1.6, 0.0, True),  # a bad token is pushed down only to 1 - eps_clip_low
        (1.1, 2.0, -2.2, -2.2, False),
        (1.1, -2.0, 2.2, 2.2, False),
        (2.0, 2.0, -2.6, 0.0, True),  # a good token is pulled up only to 1 + eps_clip_high
        (2.0, -2.0, 4.0, 4.0, False),  # a bad token that became likelier is still pushed down
    ],
)
def test_both_signs_on_both_sides_of_each_clip(
    ratio: float, advantage: float, loss: float, gradient: float, is_clipped: bool
) -> None:
    old = torch.tensor([[-1.5]], dtype=torch.float64)
    log_probs = (old + math.log(ratio)).requires_grad_()
    values, metrics = clipped_surrogate(
        log_probs, old, torch.full_like(old, advantage), CONFIG, torch.ones_like(old), old
    )
    values.sum().backward()
    assert values.item() == pytest.approx(loss)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(gradient)
    assert metrics["ppo_clip_ratio"].item() == is_clipped


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    log_probs = torch.tensor([[-0.3, -2.0, -1.0]], requires_grad=True)
    advantages = torch.tensor([[1.5, -0.5, 0.0]])
    values, metrics = clipped_surrogate(
        log_probs, log_probs.detach(), advantages, CONFIG, torch.ones_like(advantages), log_probs.detach()
    )
    values.sum().backward()
    torch.testing.assert_close(values.detach(), -advantages)
    torch.testing.assert_close(log_probs.grad, -advantages)
    assert metrics["ppo_clip_ratio"].sum() == 0


def test_the_ratio_never_overflows() -> None:
    log_probs = torch.tensor([0.0, -500.0, math.log(3.0)])
    ratio = importance_ratio(log_probs, torch.tensor([-500.0, 0.0, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20), 3.0])
