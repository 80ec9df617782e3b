"""The sampler's programs: prefill a prompt, and choose the next tokens.

Letters: S lanes, each with one sequence · C tokens of a prompt chunk · V vocabulary · K key-value heads · H head size ·
P positions on a page of the cache.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tx.models.attention import attend_to_pages
from tx.models.config import ModelConfig
from tx.models.decoder import Attend, Params, hidden_states, logits_of
from tx.models.lora import BatchAdapters
from tx.models.sharding import place_heads

MAX_STEPS = 16  # tokens per lane and call
BLOCK = 128  # probabilities per block of `_invert`


Vector = Any  # a numpy array when created, a JAX array in a program


class Cache(NamedTuple):
    """The KV cache. The last page is scratch space: writes to it are never read."""

    keys: jax.Array  # (layers, pages, K, H, P)
    values: jax.Array  # (layers, pages, K, P, H)


class Lanes(NamedTuple):
    """The positions of the lanes in a call, and their sampling settings."""

    tokens: Vector  # (S,) the last token, not in the cache yet
    positions: Vector  # (S,) its position; -1: unused lane
    n_left: Vector  # (S,) number of tokens left to choose
    tables: Vector  # (S, max pages)
    stops: Vector  # (S, MAX_STOP_TOKENS), -1: none
    temperatures: Vector  # (S,)
    top_k: Vector  # (S,) V or more: no limit
    top_p: Vector  # (S,)
    seeds: Vector  # (S,) uint32, one per request
    numbers: Vector  # (S,) the sample's index in its request


class DecodedTokens(NamedTuple):
    """The sampled tokens of a call by step, -1 where a lane was finished."""

    tokens: jax.Array  # (MAX_STEPS, S)
    logprobs: jax.Array  # (MAX_STEPS, S)
    top_tokens: jax.Array  # (MAX_STEPS, S, k)
    top_logprobs: jax.Array  # (MAX_STEPS, S, k)


State = tuple[jax.Array, Cache, Lanes, DecodedTokens]  # of the decoding loop, with the step first


def new_cache(config: ModelConfig, n_pages: int, page_size: int, dtype: jnp.dtype, mesh: Mesh) -> Cache:
    """Create an empty cache."""
    before = (config.n_layers, n_pages + 1, config.n_kv_heads)
    return Cache(
        place_heads(mesh, jnp.zeros((*before, config.head_size, page_size), dtype)),
        place_heads(mesh, jnp.zeros((*before, page_size, config.head_size), dtype)),
    )


def paged_attention(tables: jax.Array, positions: jax.Array, n_pages: jax.Array) -> Attend:
    """Return a layer's attention with the cache: it writes at `positions` (S, T), then reads up to them."""

    def attend(
        queries: jax.Array, keys: jax.Array, values: jax.Array, cache: Cache, layer: jax.Array
    ) -> tuple[jax.Array, Cache]:
        page_size = cache.keys.shape[-1]
        unused_page = cache.keys.shape[1] - 1
        pages = jnp.take_along_axis(tables, jnp.maximum(positions, 0) // page_size, axis=1)
        pages = jnp.where(positions < 0, unused_page, pages)
        offsets = jnp.maximum(positions, 0) % page_size
        cache = Cache(
            cache.keys.at[layer, pages, :, :, offsets].set(keys.astype(cache.keys.dtype)),
            cache.values.at[layer, pages, :, offsets].set(values.astype(cache.values.dtype)),
        )
        seen = attend_to_pages(queries, cache.keys, cache.values, layer, tables, positions, n_pages)
        return seen, cache

    return attend


@partial(jax.jit, static_argnames=("config", "n_top"), donate_argnames="cache")
def read_prompt(
    config: ModelConfig,
    params: Params,
    adapters: BatchAdapters | None,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    targets: jax.Array,
    table: jax.Array,
    n_pages: jax.Array,
    *,
    n_top: int | None,
) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
    """Prefill a chunk of a prompt, and return the log-probs of its next tokens.

    Args:
        tokens, positions, targets: (1, C). Padding has position -1
        table: (1, max pages). n_pages: the number of pages in use
        n_top: number of most likely tokens to return. None skips log-probs

    Returns:
        the cache, the targets' log-probs (C,), the most likely tokens (C, n_top) and their log-probs (C, n_top)
    """
    hidden, cache = hidden_states(
        config, params, adapters, tokens, positions, paged_attention(table, positions, n_pages), cache
    )
    if n_top is None:
        none = jnp.zeros(0)
        return cache, none, none, none
    logprobs = jax.nn.log_softmax(logits_of(params, adapters, hidden)[0], axis=-1)  # (C, V)
    chosen = jnp.take_along_axis(logprobs, targets[0][:, None], axis=-1)[:, 0]
    top_logprobs, top_tokens = jax.lax.top_k(logprobs, n_top)
    return cache, chosen, top_tokens, top_logprobs


@partial(jax.jit, static_argnames=("config", "n_top"), donate_argnames="cache")
def decode(
    config: ModelConfig,
    params: Params,
    adapters: BatchAdapters | None,
    cache: Cache,
    lanes: Lanes,
    n_steps: jax.Array,
    n_pages: jax.Array,
    *,
    n_top: int,
) -> tuple[Cache, DecodedTokens]:
    """Choose up to `n_steps` tokens in each lane, until the lane stops or reaches its limit."""
    n_lanes = lanes.tokens.shape[0]
    chosen = DecodedTokens(
        jnp.full((MAX_STEPS, n_lanes), -1, jnp.int32),
        jnp.zeros((MAX_STEPS, n_lanes)),
        jnp.zeros((MAX_STEPS, n_lanes, n_top), jnp.int32),
        jnp.zeros((MAX_STEPS, n_lanes, n_top)),
    )

    def should_continue(state: State) -> jax.Array:
        step, _, lanes, _ = state
        return (step < n_steps) & jnp.any(lanes.positions >= 0)

    def decode_step(state: State) -> State:
        step, cache, lanes, chosen = state
        positions = lanes.positions[:, None]
        hidden, cache = hidden_states(
            config,
            params,
            adapters,
            lanes.tokens[:, None],
            positions,
            paged_attention(lanes.tables, positions, n_pages),
            cache,
        )
        logits = logits_of(params, adapters, hidden)[:, 0]  # (S, V)
        tokens, logprobs, distribution = choose(logits, lanes)
        is_active = lanes.positions >= 0
        top_logprobs, top_tokens = (  # n_top == 0: reuse the empty (S, 0) arrays
            jax.lax.top_k(distribution, n_top) if n_top else (chosen.top_logprobs[0], chosen.top_tokens[0])
        )
        chosen = DecodedTokens(
            chosen.tokens.at[step].set(jnp.where(is_active, tokens, -1)),
            chosen.logprobs.at[step].set(logprobs),
            chosen.top_tokens.at[step].set(top_tokens),
            chosen.top_logprobs.at[step].set(top_logprobs),
        )
        is_finished = jnp.any(tokens[:, None] == lanes.stops, axis=1) | (lanes.n_left <= 1)
        lanes = lanes._replace(
            tokens=tokens,
            positions=jnp.where(is_active & ~is_finished, lanes.positions + 1, -1),
            n_left=lanes.n_left - 1,
        )
        return step + 1, cache, lanes, chosen

    _, cache, _, chosen = jax.lax.while_loop(should_continue, decode_step, (jnp.int32(0), cache, lanes, chosen))
    return cache, chosen


def choose(logits: jax.Array, lanes: Lanes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose tokens (S,). Return them, their log-probs (S,), and all log-probs (S, V) at the lanes' temperatures.

    The request's seed, the sample's index and the position determine a token, by inversion of the cumulative
    distribution. Temperature 0 is greedy and reports log-probs at temperature 1. Top-k and top-p exclude tokens from
    the choice, but log-probs are of the full distribution.
    """
    is_greedy = lanes.temperatures <= 0
    logprobs = jax.nn.log_softmax(logits / jnp.where(is_greedy, 1.0, lanes.temperatures)[:, None], axis=-1)
    kept = jnp.where(logprobs >= _min_logprob(logprobs, lanes)[:, None], logprobs, -jnp.inf)

    def key(seed: jax.Array, number: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), position)

    keys = jax.vmap(key)(lanes.seeds, lanes.numbers, lanes.positions)
    sampled = _invert(jnp.exp(kept), jax.vmap(jax.random.uniform)(keys))
    tokens = jnp.where(is_greedy | (lanes.top_k == 1), jnp.argmax(logprobs, axis=-1), sampled).astype(jnp.int32)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0], logprobs


def _min_logprob(logprobs: jax.Array, lanes: Lanes) -> jax.Array:
    """Return the minimum log-prob (S,) of tokens that may be chosen. Sorts only if a lane needs it.

    As in vLLM, `top_p` applies to the tokens that `top_k` leaves.
    """

    def threshold(_: None) -> jax.Array:
        n_tokens = logprobs.shape[-1]
        sorted_logprobs = -jnp.sort(-logprobs, axis=-1)  # (S, V), descending
        probs = jnp.where(jnp.arange(n_tokens) < lanes.top_k[:, None], jnp.exp(sorted_logprobs), 0.0)
        before = jnp.cumsum(probs, axis=-1) - probs
        is_in = (probs > 0) & (before < lanes.top_p[:, None] * probs.sum(axis=-1, keepdims=True))
        lowest = jnp.min(jnp.where(is_in.at[:, 0].set(True), sorted_logprobs, jnp.inf), axis=-1)
        return jnp.where((lanes.top_k >= n_tokens) & (lanes.top_p >= 1), -jnp.inf, lowest)

    is_limited = jnp.any((lanes.top_k < logprobs.shape[-1]) | (lanes.top_p < 1))
    no_threshold = jnp.full(logprobs.shape[0], -jnp.inf)
    return jax.lax.cond(is_limited, threshold, lambda _: no_threshold, None)


def _invert(probs: jax.Array, uniform: jax.Array) -> jax.Array:
    """Return the index where the cumulative sum of unnormalized `probs` (S, V) passes the fraction `uniform` (S,) of
    its total.

    Blocks are summed first, so that one cumulative sum is over blocks and one within a block, instead of one over the
    whole vocabulary. Example with blocks of 2, probs [1, 3 | 2, 2] and uniform 0.6: the block sums are 4 and 4, so the
    target is 0.6 · 8 = 4.8. The first block ends at 4, so the target lies 0.8 into the second block, in its first
    token: the result is index 2.
    """
    n_lanes, size = probs.shape
    blocks = jnp.pad(probs, ((0, 0), (0, -size % BLOCK))).reshape(n_lanes, -1, BLOCK)
    ends = jnp.cumsum(blocks.sum(axis=-1), axis=-1)  # (S, blocks)
    wanted = uniform * ends[:, -1]
    block = jnp.argmax(ends > wanted[:, None], axis=-1)
    lanes = jnp.arange(n_lanes)
    before = jnp.where(block > 0, ends[lanes, block - 1], 0.0)
    inside = blocks[lanes, block]  # (S, BLOCK)
    sums = jnp.cumsum(inside, axis=-1)
    is_past = (before[:, None] + sums > wanted[:, None]) & (inside > 0)
    offset = jnp.where(is_past.any(axis=-1), jnp.argmax(is_past, axis=-1), jnp.argmax(inside, axis=-1))
    return block * BLOCK + offset


@partial(jax.jit, donate_argnums=0)
def copy_pages(cache: Cache, sources: jax.Array, targets: jax.Array) -> Cache:
    """Copy pages in every layer. sources, targets (n,)."""
    return Cache(*(pages.at[:, targets].set(pages[:, sources]) for pages in cache))
