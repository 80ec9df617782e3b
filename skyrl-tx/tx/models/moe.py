"""Mixtures of experts: each token is computed by the few experts that its router chooses.

Every expert computes every token here, one expert after the other, and what was not chosen counts nothing: the shapes
are fixed, and a token's result does not depend on which other tokens there are. It costs n_experts / n_active times
what is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from tx.models.config import MoeConfig
from tx.models.lora import MLP, Factors, project


def route(moe: MoeConfig, x: jax.Array, router: jax.Array) -> jax.Array:
    """How much each expert counts for each token, mostly 0. x (S, T, D), router (D, E); (S, T, E) in float32."""
    odds = jax.nn.softmax((x @ router).astype(jnp.float32), axis=-1)
    best, chosen = jax.lax.top_k(odds, moe.n_active)
    if moe.normalizes_weights:
        best = best / best.sum(axis=-1, keepdims=True)
    return jnp.einsum("sta,stae->ste", best, jax.nn.one_hot(chosen, moe.n_experts, dtype=best.dtype))


def mix_experts(
    moe: MoeConfig,
    weights: Mapping[str, jax.Array],
    adapters: Mapping[str, Factors],
    scales: jax.Array | None,
    x: jax.Array,
) -> jax.Array:
    """x (S, T, D); the experts' weights (E, in, out); adapters of N blocks (N, E, in, r), (N, E, r, out)."""
    shares = jnp.moveaxis(route(moe, x, weights["router"]), -1, 0).astype(x.dtype)  # (E, S, T)
    by_expert = {
        name: Factors(*(jnp.moveaxis(one, 1, 0) for one in pair)) for name, pair in adapters.items() if name in MLP
    }

    def one_expert(
        total: jax.Array, part: tuple[jax.Array, jax.Array, jax.Array, jax.Array, dict[str, Factors]]
    ) -> tuple[jax.Array, None]:
        share, gate, up, down, factors = part
        middle = jax.nn.silu(project(x, gate, factors.get("gate"), scales)) * project(x, up, factors.get("up"), scales)
        return total + share[..., None] * project(middle, down, factors.get("down"), scales), None

    parts = (shares, weights["gate"], weights["up"], weights["down"], by_expert)
    total, _ = jax.lax.scan(one_expert, jnp.zeros_like(x), parts)
    return total
