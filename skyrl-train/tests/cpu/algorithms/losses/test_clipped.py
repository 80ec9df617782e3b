import math

import pytest
import torch
from train_kit.losses import score

from skyrl_train.algorithms.losses import value_loss
from skyrl_train.config.algorithm import AlgorithmConfig

CONFIG = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.3, clip_ratio_c=3.0)

CLIPPED = [  # ratio, advantage, loss, gradient, is_clipped. The gradient of -ρA in log π is -ρA, a clip has none
    (0.5, 2.0, -1.0, -1.0, 0),  # a good token that became rarer is still pushed up
    (0.5, -2.0, 1.6, 0.0, 1),  # a bad token is pushed down only to 1 - eps_clip_low
    (1.1, 2.0, -2.2, -2.2, 0),
    (1.1, -2.0, 2.2, 2.2, 0),
    (2.0, 2.0, -2.6, 0.0, 1),  # a good token is pushed up only to 1 + eps_clip_high
    (2.0, -2.0, 4.0, 4.0, 0),  # a bad token that became likelier is still pushed down
    (5.0, 2.0, -2.6, 0.0, 1),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "is_clipped"), CLIPPED)
@pytest.mark.parametrize("name", ["regular", "dual_clip"])
def test_both_signs_on_both_sides_of_each_clip(
    name: str, ratio: float, advantage: float, loss: float, gradient: float, is_clipped: float
) -> None:
    scored = score(name, [[-1.5 + math.log(ratio)]], [[advantage]], old=[[-1.5]], config=CONFIG)
    assert scored.loss == [[pytest.approx(loss)]]
    assert scored.gradient == [[pytest.approx(gradient)]]
    assert scored.metrics["ppo_clip_ratio"] == [[is_clipped]]


def test_the_clip_is_at_a_fifth_by_default() -> None:
    log_probs = [[-2.0 + math.log(1.5)], [-2.0 + math.log(0.5)]]
    for name in ("regular", "dual_clip"):
        scored = score(name, log_probs, [[1.0], [-1.0]], old=[[-2.0]] * 2)
        assert scored.loss == [[pytest.approx(-1.2)], [pytest.approx(0.8)]]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_bounded"),
    [
        (2.9, -2.0, 5.8, 5.8, 0),
        (5.0, -2.0, 6.0, 0.0, 1),  # a bad token that became much likelier is bounded by clip_ratio_c
        (5.0, 2.0, -2.6, 0.0, 0),  # a good one has the ordinary clip
        (0.1, -2.0, 1.6, 0.0, 0),
    ],
)
def test_the_dual_clip_bounds_only_bad_tokens_that_became_much_likelier(
    ratio: float, advantage: float, loss: float, gradient: float, is_bounded: float
) -> None:
    scored = score("dual_clip", [[-3 + math.log(ratio)]], [[advantage]], old=[[-3.0]], config=CONFIG)
    assert scored.loss == [[pytest.approx(loss)]]
    assert scored.gradient == [[pytest.approx(gradient)]]
    assert scored.metrics["dual_clip_ratio"] == [[is_bounded]]


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "is_clipped"),
    [
        (1.1, 1.0, 2.0, 0.405, -0.9, 0),  # ½ · 0.9²
        (1.5, 1.0, 2.0, 0.32, 0.0, 1),  # rose towards 2 by more than 0.2: ½ · 0.8²
        (0.5, 1.0, 0.0, 0.32, 0.0, 1),  # fell towards 0
        (1.5, 1.0, 0.0, 1.125, 1.5, 0),  # moved away from the target: the larger error counts
        (0.5, 1.0, 2.0, 1.125, -1.5, 0),
        (3.0, 1.0, 1.9, 0.605, 1.1, 0),  # far beyond the target: 1.1 against 0.7
    ],
)
def test_the_larger_of_the_two_errors_counts(
    value: float, old: float, target: float, loss: float, gradient: float, is_clipped: float
) -> None:
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    returned, metrics = value_loss(values, torch.full_like(values, old), torch.full_like(values, target), 0.2)
    returned.sum().backward()
    assert returned.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(gradient)
    assert metrics["values_clipfrac"].tolist() == [[is_clipped]]


@pytest.mark.parametrize("value_clip", [0.2, None])
def test_only_the_values_have_a_gradient_with_and_without_a_clip(value_clip: float | None) -> None:
    values, old, returns = (torch.ones(2, 3, requires_grad=True) for _ in range(3))
    loss, metrics = value_loss(values, old * 0.9, returns * 2, value_clip)
    loss.sum().backward()
    assert loss.tolist() == [[0.5] * 3] * 2, "half the squared error"
    assert values.grad.tolist() == [[-1.0] * 3] * 2
    assert old.grad is None
    assert returns.grad is None
    assert not metrics["values_clipfrac"].requires_grad
    assert not metrics["values_clipfrac"].any()


def test_values_within_the_range_are_not_clipped_by_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, 10, 100, generator=generator)
    values = old + 0.39 * torch.rand(10, 100, generator=generator) - 0.195
    loss, metrics = value_loss(values, old, returns, 0.2)
    assert not metrics["values_clipfrac"].any()
    assert torch.equal(loss, (values - returns).square() / 2)
