"""Low-rank adapters (Hu et al., 2021, arXiv:2106.09685). An adapter adds scale · A B to a matrix W.

Adapters are never merged and never modified in place. Training creates new arrays, so samplers that hold the old ones
are unaffected. The rows of a batch may have different adapters.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tx.models.config import AdapterConfig, ModelConfig

RANK_STEP = 8
"""Ranks are zero-padded to a multiple of this, so that adapters of similar rank share compiled programs."""
ATTENTION, MLP, HEAD = ("q", "k", "v", "o"), ("gate", "up", "down"), "head"


class Factors(NamedTuple):
    """A matrix's A and B in a block of layers: (layers, in, rank) and (layers, rank, out).

    Blocks of rows add a dimension: (layers, blocks, in, rank). Experts are a dimension before `in`. The head has no
    layers.
    """

    a: jax.Array
    b: jax.Array


class Adapter(NamedTuple):
    """Factors by matrix name, e.g. ``q``, for each block of layers, and the head's factors."""

    blocks: tuple[dict[str, Factors], ...]
    head: Factors | None


class BatchAdapters(NamedTuple):
    """The adapters of a batch. Its rows are in blocks of equal size, each with one adapter."""

    adapter: Adapter
    scales: jax.Array  # (blocks,)


def covered_names(lora: AdapterConfig, config: ModelConfig) -> tuple[str, ...]:
    """Return the matrices that an adapter covers. A head tied to the embeddings is excluded."""
    has_head = lora.train_unembed and not config.ties_embeddings
    chosen = ((lora.train_attn, ATTENTION), (lora.train_mlp, MLP), (has_head, (HEAD,)))
    return tuple(name for is_chosen, names in chosen if is_chosen for name in names)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes (…, in, out) of the matrices that adapters can target, without the layer dimension."""
    queries, keys = config.n_heads * config.head_size, config.n_kv_heads * config.head_size
    hidden, middle = config.hidden_size, config.intermediate_size
    experts: tuple[int, ...] = ()
    if config.moe is not None:
        experts, middle = (config.moe.n_experts,), config.moe.intermediate_size
    return {
        "q": (hidden, queries),
        "k": (hidden, keys),
        "v": (hidden, keys),
        "o": (queries, hidden),
        "gate": (*experts, hidden, middle),
        "up": (*experts, hidden, middle),
        "down": (*experts, middle, hidden),
        "head": (hidden, config.vocab_size),
    }


def rank_of(name: str, lora: AdapterConfig, config: ModelConfig) -> int:
    """Return the unpadded rank of a matrix's factors."""
    return lora.rank if config.moe is None or name not in MLP else lora.expert_rank(config.moe.n_experts)


def new_adapter(lora: AdapterConfig, config: ModelConfig, seed: int) -> Adapter:
    """Create an adapter with zero effect: A is uniform within ±1/√in, and B is 0."""
    generator = np.random.default_rng(seed)

    def factors(name: str, layers: tuple[int, ...]) -> Factors:
        *experts, n_in, n_out = shapes(config)[name]
        rank, padded = rank_of(name, lora, config), padded_rank(name, lora, config)
        bound = 1.0 / math.sqrt(n_in)
        a = np.zeros((*layers, *experts, n_in, padded), np.float32)
        a[..., :rank] = generator.uniform(-bound, bound, (*layers, *experts, n_in, rank))
        return Factors(jnp.asarray(a), jnp.zeros((*layers, *experts, padded, n_out), jnp.float32))

    names = covered_names(lora, config)
    blocks = tuple({name: factors(name, (n,)) for name in names if name != HEAD} for n in config.blocks)
    return Adapter(blocks, factors(HEAD, ()) if HEAD in names else None)


def padded_rank(name: str, lora: AdapterConfig, config: ModelConfig) -> int:
    """Round the rank of a matrix's factors up to a multiple of `RANK_STEP`."""
    return -(-rank_of(name, lora, config) // RANK_STEP) * RANK_STEP


@jax.jit
def rows_of(adapters: Sequence[Adapter], scales: jax.Array) -> BatchAdapters:
    """Stack adapters for the blocks of a batch. All cover the same matrices with the same padded rank."""
    blocks = jax.tree.map(lambda *parts: jnp.stack(parts, 1), *(adapter.blocks for adapter in adapters))
    heads = [adapter.head for adapter in adapters]
    return BatchAdapters(Adapter(blocks, jax.tree.map(lambda *parts: jnp.stack(parts), *heads)), scales)


def project(x: jax.Array, weight: jax.Array, factors: Factors | None, scales: jax.Array | None) -> jax.Array:
    """Return x W plus the adapters' products. x is (S, T, in), weight (in, out), factors of N blocks (N, in, r) and (N,
    r, out).
    """
    out = x @ weight
    if factors is None or scales is None:
        return out
    blocks = x.reshape(len(scales), -1, x.shape[-1]).astype(factors.a.dtype)
    inner = jnp.einsum("bti,bir->btr", blocks, factors.a) * scales[:, None, None]
    return out + jnp.einsum("btr,bro->bto", inner, factors.b).reshape(out.shape).astype(out.dtype)
