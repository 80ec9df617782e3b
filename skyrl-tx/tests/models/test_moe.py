"""Both implementations of a mixture of experts compute the same function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tx.models import moe
from tx.models.config import MoeConfig
from tx.models.lora import Factors

EXPERTS, ACTIVE, HIDDEN, MIDDLE, RANK = 6, 2, 16, 12, 4
CONFIG = MoeConfig(n_experts=EXPERTS, n_active=ACTIVE, intermediate_size=MIDDLE, normalizes_weights=True)
SHAPES = {"gate": (HIDDEN, MIDDLE), "up": (HIDDEN, MIDDLE), "down": (MIDDLE, HIDDEN)}


@settings(max_examples=12, deadline=None)
@given(
    n_tokens=st.integers(1, 60), n_experts=st.integers(2, 9), n_active=st.integers(1, 2), seed=st.integers(0, 1 << 30)
)
def test_every_token_has_a_slot_with_each_of_its_experts(
    n_tokens: int, n_experts: int, n_active: int, seed: int
) -> None:
    """Also if all tokens choose the same experts."""
    random = np.random.default_rng(seed)
    n_popular = random.integers(n_active, n_experts + 1)
    chosen = np.stack([random.permutation(n_popular)[:n_active] for _ in range(n_tokens)])
    blocks = moe.blocks_of(jnp.asarray(chosen), n_experts)
    size = blocks.tokens.shape[1]
    slots = np.asarray(blocks.slots)
    assert len(np.unique(slots)) == slots.size
    np.testing.assert_array_equal(np.asarray(blocks.experts)[slots // size], chosen)
    tokens = np.asarray(blocks.tokens).reshape(-1)
    np.testing.assert_array_equal(tokens[slots], np.arange(n_tokens)[:, None].repeat(n_active, 1))
    assert np.count_nonzero(tokens != n_tokens) == slots.size


@pytest.mark.parametrize("popular", [1.0, 30.0])
@pytest.mark.parametrize("is_adapted", [True, False])
def test_both_implementations_agree(is_adapted: bool, popular: float) -> None:
    """The gradients of all inputs are the same, too."""
    random = np.random.default_rng(0)

    def some(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), jnp.float32) * 0.3

    weights = {name: some(EXPERTS, *shape) for name, shape in SHAPES.items()}
    router = some(HIDDEN, EXPERTS).at[:, 0].multiply(popular)
    factors = {
        name: Factors(some(1, EXPERTS, n_in, RANK), some(1, EXPERTS, RANK, n_out))
        for name, (n_in, n_out) in SHAPES.items()
        if name != "up"
    }
    arguments = (weights, router, factors if is_adapted else {}, jnp.full(1, 0.7), some(3, 40, HIDDEN) * 3)

    def of_chosen(weights: Any, router: Any, factors: Any, scales: Any, x: Any) -> jax.Array:
        mixed = moe.mix_experts(CONFIG, {**weights, "router": router}, factors, scales, x)
        return jnp.sum(jnp.sin(mixed))

    def of_every(weights: Any, router: Any, factors: Any, scales: Any, x: Any) -> jax.Array:
        rows = x.reshape(-1, 1, HIDDEN)  # one token each
        return of_chosen(weights, router, factors, scales, rows)

    numbers = tuple(range(len(arguments)))
    ours = jax.jit(jax.value_and_grad(of_chosen, argnums=numbers))(*arguments)
    theirs = jax.jit(jax.value_and_grad(of_every, argnums=numbers))(*arguments)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.abs(np.asarray(other)).max() > 0 or not is_adapted
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(np.asarray(other)).max())
