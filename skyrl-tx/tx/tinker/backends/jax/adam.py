"""AdamW for one model, equivalent to `torch.optim.AdamW`.

Everything is computed in float32. Most updates are too small to change a bfloat16 number, so bfloat16 models also keep
their weights in float32 (Micikevicius et al., 2018, arXiv:1710.03740) and compute with rounded copies.
"""

import math
from dataclasses import asdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tx.tinker.types import AdamParams

Tree = Any


class JaxMoments(NamedTuple):
    """Optimizer state."""

    first: Tree
    second: Tree
    n_steps: jax.Array  # () int32
    master_weights: Tree | None = None  # the parameters in float32, if they are not


class AdamStep(NamedTuple):
    """Settings of a step as arrays, so that new values need no compilation."""

    learning_rate: jax.Array
    beta1: jax.Array
    beta2: jax.Array
    rest1: jax.Array  # 1 - beta1: may be nonzero even if beta1 rounds to 1
    rest2: jax.Array
    log_beta1: jax.Array
    log_beta2: jax.Array
    eps: jax.Array
    weight_decay: jax.Array
    grad_clip_norm: jax.Array


def new_moments(params: Tree) -> JaxMoments:
    """Return the state before the first step."""
    zeros = jax.tree.map(lambda array: jnp.zeros_like(array, jnp.float32), params)
    return JaxMoments(zeros, zeros, jnp.zeros((), jnp.int32), float32_params(params))


def float32_params(params: Tree) -> Tree | None:
    """Return the parameters in float32, or None if they already are."""
    if all(array.dtype == jnp.float32 for array in jax.tree.leaves(params)):
        return None
    return jax.tree.map(lambda array: array.astype(jnp.float32), params)


def step_of(params: AdamParams) -> AdamStep:
    """Return the settings as arrays."""
    settings = {
        "rest1": 1.0 - params.beta1,
        "rest2": 1.0 - params.beta2,
        "log_beta1": math.log(params.beta1) if params.beta1 else -math.inf,
        "log_beta2": math.log(params.beta2) if params.beta2 else -math.inf,
    } | asdict(params)
    return AdamStep(**{name: jnp.float32(settings[name]) for name in AdamStep._fields})


@jax.jit
def adam_step(params: Tree, moments: JaxMoments, gradients: Tree, step: AdamStep) -> tuple[Tree, JaxMoments, jax.Array]:
    """Return the new parameters and state, and the gradient norm before clipping.

    Discard the parameters and the state if the norm is NaN or infinite.
    """
    gradients = jax.tree.map(lambda array: array.astype(jnp.float32), gradients)
    norm = jnp.sqrt(sum(jnp.sum(array * array) for array in jax.tree.leaves(gradients)))
    is_clipped = (step.grad_clip_norm > 0) & (norm > step.grad_clip_norm)
    shrink = jnp.where(is_clipped, step.grad_clip_norm / (norm + 1e-6), 1.0)
    n_steps = moments.n_steps + 1
    correction1 = -jnp.expm1(n_steps * step.log_beta1)  # 1 - beta1 ** n_steps
    correction2 = jnp.sqrt(-jnp.expm1(n_steps * step.log_beta2))

    def update_param(param: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        size = step.learning_rate / correction1
        ratio = first / (jnp.sqrt(second) / correction2 + step.eps)
        kept = param * (1.0 - step.learning_rate * step.weight_decay)
        return kept - size * jnp.where(first == 0, 0.0, ratio)  # 0 / 0 if there never was a gradient and eps is 0

    clipped = jax.tree.map(lambda array: array * shrink, gradients)
    first = jax.tree.map(lambda m, g: step.beta1 * m + step.rest1 * g, moments.first, clipped)
    second = jax.tree.map(lambda v, g: step.beta2 * v + step.rest2 * g * g, moments.second, clipped)
    master = jax.tree.map(
        update_param, params if moments.master_weights is None else moments.master_weights, first, second
    )
    rounded = jax.tree.map(lambda array, param: array.astype(param.dtype), master, params)
    return rounded, JaxMoments(first, second, n_steps, None if moments.master_weights is None else master), norm
