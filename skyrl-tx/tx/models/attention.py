"""Attention: over whole sequences for training, and over a paged cache for sampling.

Letters: S rows · T positions of a row · K key-value heads · G query heads for each of them · H head size · P positions
on a page.
"""

from functools import partial

import jax
import jax.numpy as jnp

QUERY_BLOCK = 512
"""Query positions per block in training. With blocks, memory grows linearly with the length, not quadratically."""
MASKED = -1e30


def rotate(x: jax.Array, positions: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Rotate pairs of a head's dimensions by their position. x (S, T, …, H), positions (S, T), frequencies (H / 2,)."""
    angles = positions[..., None].astype(jnp.float32) * frequencies  # (S, T, H / 2)
    angles = angles.reshape(*angles.shape[:2], *(1,) * (x.ndim - 3), angles.shape[-1])
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend_causally(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attend causally within each row. queries (S, T, K, G, H), keys and values (S, T, K, H)."""
    length = queries.shape[1]
    if length <= QUERY_BLOCK:
        return _attend_from(queries, keys, values, 0)
    assert length % QUERY_BLOCK == 0, "lengths above a block are multiples of it"
    attend = jax.checkpoint(partial(_attend_from))

    def block(_: None, start: jax.Array) -> tuple[None, jax.Array]:
        some = jax.lax.dynamic_slice_in_dim(queries, start, QUERY_BLOCK, axis=1)
        return None, attend(some, keys, values, start)

    _, blocks = jax.lax.scan(block, None, jnp.arange(0, length, QUERY_BLOCK))  # (n, S, block, K, G, H)
    return jnp.moveaxis(blocks, 0, 1).reshape(queries.shape)


def _attend_from(queries: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array | int) -> jax.Array:
    scores = jnp.einsum("stkgh,sukh->skgtu", queries, keys, preferred_element_type=jnp.float32)
    scores *= queries.shape[-1] ** -0.5
    seen = jnp.arange(keys.shape[1]) <= start + jnp.arange(queries.shape[1])[:, None]  # (T, U)
    weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1).astype(values.dtype)
    return jnp.einsum("skgtu,sukh->stkgh", weights, values)


def attend_to_pages(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    positions: jax.Array,
    n_pages: jax.Array,
) -> jax.Array:
    """Attend to each row's cache up to its position, page by page, with a running maximum and sum.

    This is the online softmax of Milakov and Gimelshein, 2018, arXiv:1805.02867. A row of 70 tokens next to a row of
    500 reads 8 pages of 64, although 2 would do. On pages 2 to 7 all its scores are -inf: its maximum stays, every new
    weight is exp(-inf) = 0, and the old sum is rescaled by exp(0) = 1. So the result is bitwise the same as with 2
    pages, and does not depend on the other rows' lengths.

    Args:
        queries: (S, T, K, G, H)
        keys: (layers, pages, K, H, P). Only `layer` is read
        values: (layers, pages, K, P, H)
        tables: (S, max pages of a row): page numbers of each row
        positions: (S, T), -1 for an unused row
        n_pages: number of pages of the longest row
    """
    page_size = keys.shape[-1]
    scaled = jnp.moveaxis(queries, 1, 3).astype(jnp.float32) * queries.shape[-1] ** -0.5  # (S, K, G, T, H)

    def one_page(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        maximum, total, mixed = state
        page = tables[:, i]  # (S,)
        scores = _mix(scaled, keys[layer, page].astype(jnp.float32))  # (S, K, G, T, P)
        seen = i * page_size + jnp.arange(page_size) <= positions[..., None]  # (S, T, P)
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        above = jnp.maximum(maximum, scores.max(axis=-1))
        shrink = jnp.exp(maximum - above)
        weights = jnp.exp(scores - above[..., None])
        total = total * shrink + weights.sum(axis=-1)
        mixed = mixed * shrink[..., None] + _mix(weights, values[layer, page].astype(jnp.float32))
        return above, total, mixed

    shape = scaled.shape[:-1]
    start = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(scaled.shape))
    _, total, mixed = jax.lax.fori_loop(0, n_pages, one_page, start)
    return jnp.moveaxis(mixed / jnp.maximum(total, 1e-30)[..., None], 3, 1).astype(queries.dtype)


def _mix(rows: jax.Array, matrices: jax.Array) -> jax.Array:
    """Multiply rows (S, K, G, T, I) by matrices (S, K, I, O). For T = 1, a sum is faster than many small matmuls."""
    if rows.shape[3] == 1:
        return (rows[..., None] * matrices[:, :, None, None]).sum(axis=-2)
    return jnp.einsum("skgti,skio->skgto", rows, matrices)
