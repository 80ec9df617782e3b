import pytest
import torch

from skyrl_train.algorithms.losses import value_loss


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


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    values = torch.tensor([[3.0, -1.0]], requires_grad=True)
    old, returns = torch.zeros(1, 2), torch.tensor([[1.0, 1.0]])
    loss, metrics = value_loss(values, old, returns, None)
    loss.sum().backward()
    assert loss.tolist() == [[2.0, 2.0]]
    assert values.grad.tolist() == [[2.0, -2.0]]
    assert metrics["values_clipfrac"].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("value_clip", [0.2, None])
def test_only_the_values_have_a_gradient(value_clip: float | None) -> None:
    values, old, returns = (torch.ones(2, 3, requires_grad=True) for _ in range(3))
    loss, metrics = value_loss(values, old * 0.9, returns * 2, value_clip)
    loss.sum().backward()
    assert values.grad is not None
    assert old.grad is None
    assert returns.grad is None
    assert not metrics["values_clipfrac"].requires_grad


def test_values_within_the_range_are_not_clipped_by_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, 10, 100, generator=generator)
    values = old + 0.39 * torch.rand(10, 100, generator=generator) - 0.195
    loss, metrics = value_loss(values, old, returns, 0.2)
    assert not metrics["values_clipfrac"].any()
    assert torch.equal(loss, (values - returns).square() / 2)
