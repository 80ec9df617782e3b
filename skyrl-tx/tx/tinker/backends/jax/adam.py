"""AdamW for one adapter, as `torch.optim.AdamW` has it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tx.tinker.types import AdamParams

Tree = Any


class Moments(NamedTuple):
    """What the optimizer keeps."""

    first: Tree
    second: Tree
    n_steps: jax.Array  # () int32


class Step(NamedTuple):
    """The settings of one step as arrays, so that other settings compile nothing."""

    learning_rate: jax.Array
    beta1: jax.Array
    beta2: jax.Array
    eps: jax.Array
    weight_decay: jax.Array
    grad_clip_norm: jax.Array


def new_moments(params: Tree) -> Moments:
    """Of an optimizer that has done no step."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Moments(zeros, zeros, jnp.zeros((), jnp.int32))


def step_of(params: AdamParams) -> Step:
    """The settings, as arrays."""
    return Step(*(jnp.float32(getattr(params, name)) for name in Step._fields))


@jax.jit
def adam_step(params: Tree, moments: Moments, gradients: Tree, step: Step) -> tuple[Tree, Moments, jax.Array]:
    """New parameters and moments, and the norm of the gradients before they were clipped."""
    norm = jnp.sqrt(sum(jnp.sum(one * one) for one in jax.tree.leaves(gradients)))
    is_clipped = (step.grad_clip_norm > 0) & (norm > step.grad_clip_norm)
    shrink = jnp.where(is_clipped, step.grad_clip_norm / (norm + 1e-6), 1.0)
    n_steps = moments.n_steps + 1
    correction1 = 1.0 - step.beta1**n_steps
    correction2 = jnp.sqrt(1.0 - step.beta2**n_steps)

    def moved(param: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        size = step.learning_rate / correction1
        ratio = first / (jnp.sqrt(second) / correction2 + step.eps)
        kept = param * (1.0 - step.learning_rate * step.weight_decay)
        return kept - size * jnp.where(first == 0, 0.0, ratio)  # what has no gradient may have no eps either

    clipped = jax.tree.map(lambda one: one * shrink, gradients)
    first = jax.tree.map(lambda m, g: step.beta1 * m + (1.0 - step.beta1) * g, moments.first, clipped)
    second = jax.tree.map(lambda v, g: step.beta2 * v + (1.0 - step.beta2) * g * g, moments.second, clipped)
    return jax.tree.map(moved, params, first, second), Moments(first, second, n_steps), norm
