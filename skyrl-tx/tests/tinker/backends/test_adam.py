"""The optimizer step of each backend equals that of `torch.optim.AdamW`."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tx.tinker.backends.jax import adam as jax_adam
from tx.tinker.backends.torch import adam as torch_adam
from tx.tinker.types import AdamParams

Arrays = Sequence[np.ndarray]
Step = Callable[[Arrays, AdamParams], tuple[Arrays, float]]
"""Maps gradients to parameters and the norm of the gradients."""

SHAPES = ((4, 6), (5,), (2, 3, 2))
CLIPPED, FREE = 3.0, 1e3
STEPS = [
    AdamParams(learning_rate=1e-2),
    AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.999, grad_clip_norm=CLIPPED),
    AdamParams(learning_rate=2e-2, weight_decay=0.3, grad_clip_norm=CLIPPED),
    AdamParams(learning_rate=1e-2, beta1=0.95, eps=0.1, grad_clip_norm=FREE),
    AdamParams(learning_rate=5e-3, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=CLIPPED),
    AdamParams(learning_rate=1e-2),
]


def jax_step(params: Arrays) -> Step:
    now = [jnp.asarray(one) for one in params]
    moments = jax_adam.new_moments(now)

    def step(gradients: Arrays, settings: AdamParams) -> tuple[Arrays, float]:
        nonlocal now, moments
        arrays = [jnp.asarray(one) for one in gradients]
        now, moments, norm = jax_adam.adam_step(now, moments, arrays, jax_adam.step_of(settings))
        return [np.asarray(one) for one in now], float(norm)

    return step


def torch_step(params: Arrays) -> Step:
    now = [torch.tensor(one) for one in params]
    optimizer = torch_adam.new_optimizer(now)

    def step(gradients: Arrays, settings: AdamParams) -> tuple[Arrays, float]:
        norm = torch_adam.adam_step(optimizer, [torch.tensor(one) for one in gradients], settings)
        return [one.numpy().copy() for one in now], norm

    return step


def reference(params: Arrays) -> Step:
    """Return a step in float64."""
    now = [torch.tensor(one, dtype=torch.float64, requires_grad=True) for one in params]
    optimizer = torch.optim.AdamW(now)

    def step(gradients: Arrays, settings: AdamParams) -> tuple[Arrays, float]:
        for one, gradient in zip(now, gradients, strict=True):
            one.grad = torch.tensor(gradient, dtype=torch.float64)
        norm = torch.nn.utils.clip_grad_norm_(now, settings.grad_clip_norm or float("inf"))
        betas = (settings.beta1, settings.beta2)
        group = {"lr": settings.learning_rate, "betas": betas, "eps": settings.eps}
        optimizer.param_groups[0].update(group, weight_decay=settings.weight_decay)
        optimizer.step()
        return [one.detach().numpy().copy() for one in now], float(norm)

    return step


@pytest.mark.parametrize("stepper", [jax_step, torch_step])
def test_settings_change_with_every_step(stepper: Callable[[Arrays], Step]) -> None:
    """One parameter never has a gradient."""
    rng = np.random.default_rng(0)
    params = [0.1 * rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    ours, theirs = stepper(params), reference(params)
    before: Arrays = params
    for settings, size in zip(STEPS, (1.0, 2.0, 0.7, 1.0, 3.0, 1e-7), strict=True):
        gradients = [size * rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
        gradients[1][0] = 0
        (found, norm), (expected, expected_norm) = ours(gradients, settings), theirs(gradients, settings)
        np.testing.assert_allclose(norm, expected_norm, rtol=1e-6)
        assert settings.grad_clip_norm == 0 or (norm > settings.grad_clip_norm) == (settings.grad_clip_norm == CLIPPED)
        for one, other, start in zip(found, expected, before, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * np.abs(other - start).max())
        before = expected


@pytest.mark.parametrize("stepper", [jax_step, torch_step])
@pytest.mark.parametrize("betas", [(1 - 1e-9, 1 - 1e-12), (0.0, 0.0)])  # the first ones round to 1 in float32
def test_the_first_step_is_the_learning_rate_for_any_betas(
    stepper: Callable[[Arrays], Step], betas: tuple[float, float]
) -> None:
    settings = AdamParams(learning_rate=0.01, beta1=betas[0], beta2=betas[1], eps=0.0)
    (found,), _ = stepper([np.zeros(3, np.float32)])([np.array([0.5, -2.0, 0.0], np.float32)], settings)
    np.testing.assert_allclose(found, [-0.01, 0.01, 0.0], rtol=1e-4)
