"""Both implementations of a mixture of experts compute the same function."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tx.models import moe
from tx.models.config import MoeConfig
from tx.models.lora import Factors

EXPERTS, ACTIVE, HIDDEN, MIDDLE, RANK = 6, 2, 16, 12, 4
CONFIG = MoeConfig(n_experts=EXPERTS, n_active=ACTIVE, intermediate_size=MIDDLE, normalizes_weights=True)
SHAPES = {"gate": (HIDDEN, MIDDLE), "up": (HIDDEN, MIDDLE), "down": (MIDDLE, HIDDEN)}


@pytest.mark.parametrize(("n_tokens", "n_experts", "n_active"), [(1, 2, 2), (60, 2, 1), (41, 9, 2), (7, 5, 1)])
def test_every_token_has_a_slot_with_each_of_its_experts(n_tokens: int, n_experts: int, n_active: int) -> None:
    """Also if all tokens choose the same experts."""
    assign = jax.jit(moe.blocks_of, static_argnums=1)
    for n_popular in range(n_active, n_experts + 1):
        random = np.random.default_rng(n_popular)
        chosen = np.stack([random.permutation(n_popular)[:n_active] for _ in range(n_tokens)])
        experts, tokens, slots = map(np.asarray, assign(chosen, n_experts))
        assert len(np.unique(slots)) == slots.size
        np.testing.assert_array_equal(experts[slots // tokens.shape[1]], chosen)
        tokens = tokens.reshape(-1)
        np.testing.assert_array_equal(tokens[slots], np.arange(n_tokens)[:, None].repeat(n_active, 1))
        assert np.count_nonzero(tokens != n_tokens) == slots.size


@pytest.mark.parametrize("is_adapted", [True, False])
def test_both_implementations_agree(is_adapted: bool) -> None:
    """The gradients of all inputs are the same, too, also if most tokens choose one expert."""
    random = np.random.default_rng(0)

    def some(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), jnp.float32) * 0.3

    weights = {name: some(EXPERTS, *shape) for name, shape in SHAPES.items()}
    router = some(HIDDEN, EXPERTS)
    factors = {
        name: Factors(some(1, EXPERTS, n_in, RANK), some(1, EXPERTS, RANK, n_out))
        for name, (n_in, n_out) in SHAPES.items()
        if name != "up"
    }
    rest = (factors if is_adapted else {}, jnp.full(1, 0.7), some(3, 40, HIDDEN) * 3)

    def of_chosen(weights: Any, router: Any, factors: Any, scales: Any, x: Any) -> jax.Array:
        mixed = moe.mix_experts(CONFIG, {**weights, "router": router}, factors, scales, x)
        return jnp.sum(jnp.sin(mixed))

    def of_every(weights: Any, router: Any, factors: Any, scales: Any, x: Any) -> jax.Array:
        rows = x.reshape(-1, 1, HIDDEN)  # one token each
        return of_chosen(weights, router, factors, scales, rows)

    ours, theirs = (jax.jit(jax.value_and_grad(one, argnums=(0, 1, 2, 3, 4))) for one in (of_chosen, of_every))
    for popularity in (1.0, 30.0):
        arguments = (weights, router.at[:, 0].multiply(popularity), *rest)
        for one, other in zip(jax.tree.leaves(ours(*arguments)), jax.tree.leaves(theirs(*arguments)), strict=True):
            assert np.abs(np.asarray(other)).max() > 0 or not is_adapted
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(np.asarray(other)).max())
