"""Mixtures of experts: the router chooses a few experts for each token.

For whole sequences, each expert's tokens are gathered in blocks of fixed size, one expert after the other. Blocks are
padded with zeros, so shapes are static although the number of tokens per expert is not. The cost is the chosen experts'
plus less than a block per expert (Gale et al., 2022, arXiv:2211.15841).

When each row has one token, every expert computes every row, and experts that were not chosen have share 0, so a row's
result is bitwise independent of the other rows. For few rows, the cost is dominated by reading the weights anyway.

Letters: S rows · T positions · D hidden size · E experts · N tokens, S × T · B tokens of a block.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tx.models.config import MoeConfig
from tx.models.lora import MLP, Factors, project

Weights = Mapping[str, jax.Array]
MIN_BLOCK, MAX_BLOCK = 8, 128


def mix_experts(
    moe: MoeConfig, weights: Weights, adapters: Mapping[str, Factors], scales: jax.Array | None, x: jax.Array
) -> jax.Array:
    """Compute the mixture for x (S, T, D), with weights (E, in, out) and the adapters of n blocks of rows, (n, E, in,
    r) and (n, E, r, out).
    """
    best, chosen = route(moe, x, weights["router"])
    experts = {name: weights[name] for name in MLP}
    factors = {name: adapters[name] for name in MLP if name in adapters}
    if x.shape[1] == 1:
        shares = jnp.einsum("sta,stae->ste", best, jax.nn.one_hot(chosen, moe.n_experts, dtype=best.dtype))
        return _every_expert(experts, factors, scales, x, shares.astype(x.dtype))
    return _chosen_experts(experts, factors, scales, x, best.astype(x.dtype), chosen)


def route(moe: MoeConfig, x: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the shares of each token's chosen experts, and the experts' indices. x (S, T, D), router (D, E)."""
    odds = jax.nn.softmax((x @ router).astype(jnp.float32), axis=-1)
    best, chosen = jax.lax.top_k(odds, moe.n_active)
    if moe.normalizes_weights:
        best = best / best.sum(axis=-1, keepdims=True)
    return best, chosen


def mlp(weights: Weights, factors: Mapping[str, Factors], scales: jax.Array | None, x: jax.Array) -> jax.Array:
    """Compute an MLP or one expert. x (S, T, D), weights (in, out), factors of row blocks (blocks, in, r), (blocks, r,
    out).
    """
    gate, up = (project(x, weights[name], factors.get(name), scales) for name in ("gate", "up"))
    return project(jax.nn.silu(gate) * up, weights["down"], factors.get("down"), scales)


# -- every expert


def _every_expert(
    weights: Weights, factors: Mapping[str, Factors], scales: jax.Array | None, x: jax.Array, shares: jax.Array
) -> jax.Array:
    """Sum all experts, weighted by shares (S, T, E). Most shares are 0."""
    by_expert = jax.tree.map(lambda factor: jnp.moveaxis(factor, 1, 0), factors)

    def add(total: jax.Array, part: tuple[jax.Array, Weights, Mapping[str, Factors]]) -> tuple[jax.Array, None]:
        share, of_expert, its_factors = part
        return total + share[..., None] * mlp(of_expert, its_factors, scales, x), None

    total, _ = jax.lax.scan(add, jnp.zeros_like(x), (jnp.moveaxis(shares, -1, 0), weights, by_expert))
    return total


# -- chosen experts


class Blocks(NamedTuple):
    """Assignment of tokens to blocks."""

    experts: jax.Array  # (blocks,)
    tokens: jax.Array  # (blocks, B); N: padding
    slots: jax.Array  # (N, experts per token): indices of the token's results in all blocks


def blocks_of(chosen: jax.Array, n_experts: int) -> Blocks:
    """Assign tokens to blocks by their experts (N, experts per token).

    Example: 4 tokens, 1 expert per token, 3 experts, blocks of 2 tokens, chosen = [2, 0, 2, 2]. Expert 0 has 1 token
    and needs 1 block, expert 1 none, expert 2 has 3 tokens and needs 2. The blocks' experts are [0, 2, 2], their tokens
    [[1, N], [0, 2], [3, N]] with N = 4 for padding, and the slots of tokens 0 to 3 are [2, 0, 3, 4]. The number of
    blocks must be static: it is the maximum over all possible choices, so some blocks at the end may be padding only.
    """
    n_tokens, n_active = chosen.shape
    n_pairs = n_tokens * n_active
    size = block_size(n_pairs, n_experts)
    n_blocks = (n_pairs + n_experts * (size - 1)) // size  # the worst case: each expert's last block has only one token
    counts = jnp.bincount(chosen.reshape(-1), length=n_experts)
    n_whole = -(-counts // size)  # blocks per expert
    ends = jnp.cumsum(n_whole)
    order = jnp.argsort(chosen.reshape(-1), stable=True)  # (token, expert) pairs by expert
    expert = chosen.reshape(-1)[order]
    number = jnp.arange(n_pairs) - (jnp.cumsum(counts) - counts)[expert]  # index among the expert's own pairs
    slot = (ends - n_whole)[expert] * size + number
    return Blocks(
        experts=jnp.minimum(jnp.searchsorted(ends, jnp.arange(n_blocks), side="right"), n_experts - 1),
        tokens=jnp.full(n_blocks * size, n_tokens).at[slot].set(order // n_active).reshape(n_blocks, size),
        slots=jnp.zeros(n_pairs, jnp.int32).at[order].set(slot).reshape(n_tokens, n_active),
    )


def block_size(n_pairs: int, n_experts: int) -> int:
    """Return a block size of about half the tokens per expert, so that few slots are empty. It is a power of two."""
    size = MIN_BLOCK
    while 4 * size * n_experts <= n_pairs and size < MAX_BLOCK:
        size *= 2
    return size


def _chosen_experts(
    weights: Weights,
    factors: Mapping[str, Factors],
    scales: jax.Array | None,
    x: jax.Array,
    best: jax.Array,
    chosen: jax.Array,
) -> jax.Array:
    """Compute only the chosen experts. best, chosen (S, T, experts per token). All rows have the same adapter."""
    assert scales is None or len(scales) == 1, "whole sequences are read with one adapter at a time"
    n_experts = weights["gate"].shape[0]
    tokens = x.reshape(-1, x.shape[-1])
    blocks = blocks_of(chosen.reshape(len(tokens), -1), n_experts)
    rows = jnp.take(tokens, blocks.tokens, axis=0, mode="fill", fill_value=0)  # (blocks, B, D)
    mixed = _by_blocks(blocks.experts, weights, factors, scales, rows).reshape(-1, x.shape[-1])[blocks.slots]
    return jnp.einsum("nad,na->nd", mixed, best.reshape(len(tokens), -1)).reshape(x.shape)


@jax.custom_vjp
def _by_blocks(
    experts: jax.Array, weights: Weights, factors: Mapping[str, Factors], scales: jax.Array | None, rows: jax.Array
) -> jax.Array:
    """Apply the expert of each block to its rows (blocks, B, D).

    The custom gradient recomputes each block (twice if layers are rematerialized too), and accumulates in place per
    expert. JAX's gradient would allocate an array of the size of all experts for each block.
    """
    return jax.lax.map(
        lambda part: mlp(*_of_expert(part[0], weights, factors), scales, part[1][None])[0], (experts, rows)
    )


def _of_expert(
    expert: jax.Array, weights: Weights, factors: Mapping[str, Factors]
) -> tuple[Weights, Mapping[str, Factors]]:
    return {name: array[expert] for name, array in weights.items()}, jax.tree.map(
        lambda array: array[:, expert], factors
    )


Residuals = tuple[jax.Array, Weights, Mapping[str, Factors], jax.Array | None, jax.Array]


def _forward(*arguments: Any) -> tuple[jax.Array, Residuals]:
    return _by_blocks(*arguments), arguments


def _backward(kept: Residuals, gradients: jax.Array) -> tuple[Any, ...]:
    experts, weights, factors, scales, rows = kept

    def one_block(totals: Any, part: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        expert, block_rows, gradient = part
        _, back = jax.vjp(mlp, *_of_expert(expert, weights, factors), scales, block_rows[None])
        of_weights, of_factors, of_scales, of_rows = back(gradient[None])
        total_weights, total_factors, total_scales = totals
        totals = (
            jax.tree.map(lambda all_, part: all_.at[expert].add(part), total_weights, of_weights),
            jax.tree.map(lambda all_, part: all_.at[:, expert].add(part), total_factors, of_factors),
            jax.tree.map(jnp.add, total_scales, of_scales),
        )
        return totals, of_rows[0]

    inputs = (weights, factors, scales)
    zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), inputs)
    totals, of_rows = jax.lax.scan(one_block, zeros, (experts, rows, gradients))
    return None, *jax.tree.map(lambda total, array: total.astype(array.dtype), totals, inputs), of_rows


_by_blocks.defvjp(_forward, _backward)
