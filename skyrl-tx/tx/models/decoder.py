"""The decoder of Qwen3 (Yang et al., 2025, arXiv:2505.09388) and Llama 3 (Dubey et al., 2024, arXiv:2407.21783).

Training and sampling share one function, with different attention.

Letters: S sequences · T positions · D hidden size · V vocabulary · K key-value heads · G query heads for each of them ·
H head size.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tx.models.attention import attend_causally, rotate
from tx.models.config import ModelConfig, inverse_frequencies
from tx.models.lora import BatchAdapters, Factors, project
from tx.models.moe import Weights, mix_experts, mlp

Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, jax.Array], tuple[jax.Array, Any]]
"""A function from queries (S, T, K, G, H), keys and values (S, T, K, H), the cache and the layer's index to the
attention's output, with the shape of the queries, and the new cache.
"""


class Params(NamedTuple):
    """A model's weights. Matrices are (in, out)."""

    embed: jax.Array  # (V, D)
    blocks: tuple[dict[str, jax.Array], ...]  # (layers of the block, …)
    norm: jax.Array  # (D,)
    head: jax.Array | None  # (D, V); None: tied to the embeddings

    @property
    def unembed(self) -> jax.Array:
        """Output projection (D, V)."""
        return self.embed.T if self.head is None else self.head


def normalize(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Apply RMSNorm over the last dimension, in float32."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return weight * wide.astype(x.dtype)


def hidden_states(
    config: ModelConfig,
    params: Params,
    adapters: BatchAdapters | None,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend | None = None,
    cache: Any = None,
    *,
    remat: bool = False,
) -> tuple[jax.Array, Any]:
    """Run the decoder. Return the final hidden states (S, T, D) and the cache.

    Args:
        tokens, positions: (S, T)
        adapters: the adapters of the sequences, or None for the base model
        attend: a layer's attention. The default is causal over the whole sequence, without a cache
        remat: recompute layers in the backward pass instead of keeping their activations
    """
    frequencies = jnp.asarray(inverse_frequencies(config), jnp.float32)
    attend_layer = attend or (lambda q, k, v, cache, _: (attend_causally(q, k, v), cache))
    scales = None if adapters is None else adapters.scales

    def layer(
        state: tuple[jax.Array, Any], part: tuple[Weights, dict[str, Factors], jax.Array]
    ) -> tuple[tuple[jax.Array, Any], None]:
        x, cache = state
        weights, factors, index = part
        attended, cache = _attention(
            config,
            weights,
            factors,
            scales,
            x,
            positions,
            frequencies,
            lambda q, k, v: attend_layer(q, k, v, cache, index),
        )
        x = x + attended
        normal = normalize(x, weights["mlp_norm"], config.rms_norm_eps)
        if config.moe is None:
            return (x + mlp(weights, factors, scales, normal), cache), None
        return (x + mix_experts(config.moe, weights, factors, scales, normal), cache), None

    step = jax.checkpoint(layer) if remat else layer
    state = (params.embed[tokens], cache)
    first = 0
    for i, n_layers in enumerate(config.blocks):
        factors = {} if adapters is None else adapters.adapter.blocks[i]
        parts = (params.blocks[i], factors, first + jnp.arange(n_layers))
        if n_layers == 1:
            state, _ = step(state, jax.tree.map(lambda part: part[0], parts))
        else:
            state, _ = jax.lax.scan(step, state, parts)
        first += n_layers
    x, cache = state
    return normalize(x, params.norm, config.rms_norm_eps), cache


def logits_of(params: Params, adapters: BatchAdapters | None, hidden: jax.Array) -> jax.Array:
    """Return logits (S, T, V) in float32."""
    head = None if adapters is None else adapters.adapter.head
    scales = None if adapters is None else adapters.scales
    return project(hidden, params.unembed, head, scales).astype(jnp.float32)


def _attention(
    config: ModelConfig,
    weights: Weights,
    adapters: Mapping[str, Factors],
    scales: jax.Array | None,
    x: jax.Array,
    positions: jax.Array,
    frequencies: jax.Array,
    attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]],
) -> tuple[jax.Array, Any]:
    n_rows, length, _ = x.shape
    normal = normalize(x, weights["attention_norm"], config.rms_norm_eps)
    q, k, v = (project(normal, weights[name], adapters.get(name), scales) for name in ("q", "k", "v"))
    q = q.reshape(n_rows, length, config.n_kv_heads, config.n_groups, config.head_size)
    k, v = (projected.reshape(n_rows, length, config.n_kv_heads, config.head_size) for projected in (k, v))
    if config.has_qk_norm:
        q = normalize(q, weights["q_norm"], config.rms_norm_eps)
        k = normalize(k, weights["k_norm"], config.rms_norm_eps)
    q, k = rotate(q, positions, frequencies), rotate(k, positions, frequencies)
    seen, cache = attend(q, k, v)
    return project(seen.reshape(n_rows, length, -1), weights["o"], adapters.get("o"), scales), cache
