"""KL estimates and their gradients against the formulas, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from skyrl_train.algorithms.kl import KLEstimator, approximate_kl

LOG_2 = math.log(2)


@pytest.mark.parametrize(
    ("estimator", "d", "value", "gradient"),
    [  # d = ref - policy; the gradient is taken in the policy's log-prob
        ("k1", LOG_2, -LOG_2, 1.0),
        ("k1", -LOG_2, LOG_2, 1.0),
        ("abs", LOG_2, LOG_2, -1.0),
        ("abs", -LOG_2, LOG_2, 1.0),
        ("k2", LOG_2, LOG_2**2 / 2, -LOG_2),
        ("k2", -LOG_2, LOG_2**2 / 2, LOG_2),
        ("k3", LOG_2, 1 - LOG_2, -1.0),  # 2 - log 2 - 1; gradient 1 - e^d
        ("k3", -LOG_2, LOG_2 - 0.5, 0.5),  # 1/2 + log 2 - 1
        ("k3", 1000.0, 10.0, 0.0),  # held below 10, and no overflow on the way
        ("k3", -1000.0, 10.0, 0.0),  # d is held within ±20
    ],
)
def test_value_and_gradient(estimator: KLEstimator, d: float, value: float, gradient: float) -> None:
    log_probs = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    kl = approximate_kl(log_probs, log_probs.detach() + d, estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_ones_average_to_the_divergence(estimator: KLEstimator) -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.1, 0.4])
    expected = (policy * (policy / reference).log()).sum()
    kl = approximate_kl(policy.log(), reference.log(), estimator)
    torch.testing.assert_close((policy * kl).sum(), expected)
