from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tx.tinker.backends.jax.training import XP
from tx.tinker.backends.torch.training import XP as TORCH
from tx.tinker.losses import LOSSES, token_losses

MASK = np.arange(12) % 3 != 0
"""The sequence mask of gspo."""


def by_hand(name: str, lp: torch.Tensor, q: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Compute the token losses of a sequence by the formulas of the papers."""
    total = torch.zeros((), dtype=torch.float64)
    mean_gap = (lp.detach() - q)[torch.tensor(MASK)].mean()
    for t in range(len(lp)):
        ratio = torch.exp(lp[t] - q[t])
        if name == "importance_sampling":
            total = total - ratio * a[t]
        elif name == "ppo":
            total = total - torch.minimum(ratio * a[t], torch.clamp(ratio, 0.8, 1.2) * a[t])
        elif name == "cispo":
            total = total - torch.clamp(ratio.detach(), 0.0, 4.0) * a[t] * lp[t]
        elif name == "dro":
            total = total - (a[t] * lp[t] - 0.025 * (lp[t] - q[t]) ** 2)
        elif name == "gspo":
            s = torch.exp(mean_gap) * torch.exp(lp[t] - lp[t].detach())
            total = total - torch.minimum(s * a[t], torch.clamp(s, 0.8, 1.2) * a[t])
    return total


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
@pytest.mark.parametrize("shift", [-1.5, -0.1, 0.1, 1.5])
def test_losses_and_gradients_far_from_one(name: str, shift: float) -> None:
    rng = np.random.default_rng(3)
    q = -rng.uniform(0.1, 3.0, 12)
    lp, a = q + shift + rng.normal(0, 0.3, 12), rng.normal(0, 1, 12)
    leaf = torch.tensor(lp, requires_grad=True)
    expected = by_hand(name, leaf, torch.tensor(q), torch.tensor(a))
    expected.backward()
    with jax.enable_x64(True):
        values, gradients = values_and_gradients("jax", name, lp, q, a, mask=MASK, dtype=np.float64)
    np.testing.assert_allclose(values.sum(), expected.item(), rtol=1e-9)
    np.testing.assert_allclose(gradients, leaf.grad, rtol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("nonsense", [np.nan, np.inf, -np.inf])
def test_masked_values_may_be_anything(name: str, nonsense: float) -> None:
    masked = {"weights": [0.0, 1.0], "mask": [np.nan, 1.0]}
    values, gradients = values_and_gradients("jax", name, [nonsense, -0.95], [0.0, -1.0], [0.0, 2.0], **masked)
    assert np.isfinite(values).all()
    assert gradients[0] == 0
    assert gradients[1] != 0


@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize(
    ("name", "logprobs", "advantages", "expected", "gradient"),
    [  # computed by hand: lp is -1 and -2 everywhere, and the mask of gspo 1
        *((name, [-1e4, -2.0], [0.0, 3.0], [0.0, -3.0], [0.0, -3.0]) for name in ("importance_sampling", "ppo")),
        ("cispo", [-1e4, -2.0], [0.0, 3.0], [0.0, 6.0], [0.0, -3.0]),
        ("dro", [-1.5, -2.4], [0.0, 3.0], [0.025 * 0.25, 6.0 + 0.025 * 0.16], [0.025, -3.0 + 0.05 * 0.4]),
        ("dro", [0.0, -2.4], [0.0, 3.0], [0.0, 6.0 + 0.025 * 0.16], [0.0, -3.0 + 0.05 * 0.4]),
        ("gspo", [0.0, -1.7], [0.0, 2.0], [0.0, -2 * np.exp(-0.65)], [0.0, -2 * np.exp(-0.65)]),
        ("gspo", [-1e4, -2.0], [0.0, 2.0], [0.0, -2.4], [0.0, 0.0]),
        ("gspo, fully masked", [-3.0, -2.5], [3.0, -1.0], [-3.0, 1.0], [-3.0, 1.0]),  # the ratio is 1
    ],
)
def test_without_advantage(
    name: str,
    framework: str,
    logprobs: list[float],
    advantages: list[float],
    expected: list[float],
    gradient: list[float],
) -> None:
    """Such tokens do not count, except for their distance in dro, if they were sampled, and for the mean in gspo."""
    name, _, is_masked = name.partition(", ")
    mask = [0.0, 0.0] if is_masked else None
    found = values_and_gradients(framework, name, [-1.0, -2.0], logprobs, advantages, mask=mask)
    np.testing.assert_allclose(found, [expected, gradient], rtol=1e-5)


@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_infinite_and_zero_ratios_are_clipped(name: str, framework: str) -> None:
    """Ratios of infinity and 0 have finite gradients."""
    high, low = (4.0, 0.0) if name == "cispo" else (1.2, 0.8)
    for gap, bound, advantage in ((1e4, high, 2.0), (-1e4, low, -2.0)):
        value, gradient = values_and_gradients(framework, name, [-1.0], [-1.0 - gap], [advantage])
        np.testing.assert_allclose(value, -bound * advantage * (-1.0 if name == "cispo" else 1.0), rtol=1e-6)
        np.testing.assert_allclose(gradient, -bound * advantage if name == "cispo" else 0.0, rtol=1e-6)


def values_and_gradients(
    framework: str,
    name: str,
    lp: Sequence[float],
    logprobs: Sequence[float],
    advantages: Sequence[float],
    *,
    mask: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    dtype: type[np.floating[Any]] = np.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute token losses and gradients. Mask and weights are 1 by default."""
    ones = [1.0] * len(lp)
    inputs = {"logprobs": logprobs, "advantages": advantages, "weights": ones if weights is None else weights}
    inputs["sequence_ratio_mask"] = ones if mask is None else mask
    needed = {key: inputs[key] for key in inputs if key == "weights" or key in LOSSES[name].needs}
    arrays = {key: np.array(value, dtype) for key, value in needed.items()}
    settings, now = LOSSES[name].settings, np.array(lp, dtype)
    if framework == "jax":
        found, pull = jax.vjp(lambda lp: token_losses(name, XP, lp, arrays, settings), jnp.asarray(now))
        return np.asarray(found), np.asarray(pull(jnp.ones_like(found))[0])
    tensors = {key: torch.from_numpy(value) for key, value in arrays.items()}
    leaf = torch.from_numpy(now).requires_grad_()
    losses = token_losses(name, TORCH, leaf, tensors, settings)
    losses.sum().backward()
    return losses.detach().numpy(), leaf.grad.numpy()
