"""Forward and backward passes over micro-batches whose rows may each have their own adapter.

A micro-batch has a fixed shape for its length, whatever else is there to do, and a row's result does not depend on the
others. Gradients are added up row by row in the order of the request. So a model learns to the last bit the same alone
and beside others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx.models.config import ModelConfig
from tx.models.decoder import Params, hidden_states, logits_of
from tx.models.lora import Adapter, Rows
from tx.tinker.losses import token_losses
from tx.tinker.types import Datum

MICRO_BATCH_TOKENS = 2048
MOST_ROWS = 16
SHORTEST = 32
LOGITS_AT_ONCE = 1 << 24
"""Logits of a micro-batch that are computed at once; more are computed in chunks, twice, and never kept."""

XP = SimpleNamespace(
    exp=jnp.exp, minimum=jnp.minimum, clip=jnp.clip, where=jnp.where, sum=jnp.sum, stop_gradient=jax.lax.stop_gradient
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a program is compiled for."""

    length: int
    n_targets: int

    @property
    def n_rows(self) -> int:
        """Rows of a micro-batch."""
        return max(1, min(MOST_ROWS, MICRO_BATCH_TOKENS // self.length))


def bucket(length: int) -> int:
    """The next length that programs are compiled for: 32, 48, 64, 96, 128, … and multiples of 512 from there on."""
    size = SHORTEST
    while size < length:
        if size >= 512:
            return -(-length // 512) * 512
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def shape_of(datum: Datum) -> Shape:
    """The shape that a datum is computed in."""
    targets = datum.inputs["target_tokens"]
    return Shape(bucket(len(datum.tokens)), 0 if targets.ndim == 1 else targets.shape[1])


def padded(data: Sequence[Datum], shape: Shape) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Tokens (M, L) and inputs (M, L) or (M, L, K) of a micro-batch; what is not there is 0, and so is its weight."""
    tokens = np.zeros((shape.n_rows, shape.length), np.int32)
    kinds = {name: value.dtype for name, value in data[0].inputs.items()}
    size = (shape.n_rows, shape.length, *([shape.n_targets] if shape.n_targets else []))
    inputs = {name: np.zeros(size, kind) for name, kind in kinds.items()}
    for row, datum in enumerate(data):
        tokens[row, : len(datum.tokens)] = datum.tokens
        for name, value in datum.inputs.items():
            inputs[name][row, : len(value)] = value
    return tokens, inputs


def target_logprobs(params: Params, rows: Rows | None, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """Log-probs (M, L, K) of targets (M, L, K) after hidden states (M, L, D)."""
    n_rows, length, _ = hidden.shape
    vocabulary = params.unembed.shape[1]
    n_chunks = 1
    while n_rows * length * vocabulary > n_chunks * LOGITS_AT_ONCE and n_chunks < length:
        n_chunks *= 2
    if length % n_chunks:
        n_chunks = length

    def some(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        logits = logits_of(params, rows, hidden)
        chosen = jnp.take_along_axis(logits, targets, axis=-1)
        return chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    if n_chunks == 1:
        return some(hidden, targets)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(n_rows, n_chunks, length // n_chunks, x.shape[-1]), 1, 0)

    parts = jax.lax.map(lambda pair: jax.checkpoint(some)(*pair), (split(hidden), split(targets)))
    return jnp.moveaxis(parts, 0, 1).reshape(targets.shape)


@partial(jax.jit, static_argnames=("config", "loss", "has_gradient", "trains_all", "remat"))
def micro_batch(
    config: ModelConfig,
    params: Params,
    rows: Rows | None,
    tokens: jax.Array,
    inputs: Mapping[str, jax.Array],
    settings: Mapping[str, jax.Array],
    *,
    loss: str,
    has_gradient: bool,
    trains_all: bool,
    remat: bool,
) -> tuple[jax.Array, jax.Array, Any]:
    """Log-probs and losses of targets (M, L, …), and the gradients.

    They are of the rows' factors, (layers, M, in, r), not yet summed; or with `trains_all` of all parameters.
    """
    targets = inputs["target_tokens"]
    wide = targets if targets.ndim == 3 else targets[..., None]
    given = {name: value for name, value in inputs.items() if name != "target_tokens"}
    columns = {name: value[:, None] for name, value in settings.items()}  # (M, 1): each row has its own

    def total(trained: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        weights = trained if trains_all else params
        adapters = rows if rows is None or trains_all else rows._replace(adapter=trained)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = hidden_states(config, weights, adapters, tokens, positions, remat=remat)
        lp = target_logprobs(weights, adapters, hidden, wide).reshape(targets.shape)
        losses = token_losses(loss, XP, lp, given, columns if targets.ndim == 2 else _deeper(columns))
        return losses.sum(), (lp, losses)

    trained = params if trains_all or rows is None else rows.adapter
    if not has_gradient:
        _, (lp, losses) = total(trained)
        return lp, losses, None
    gradients, (lp, losses) = jax.grad(total, has_aux=True)(trained)
    return lp, losses, gradients


@partial(jax.jit, donate_argnums=0)
def add_rows(total: Adapter, gradients: Adapter, first: jax.Array, end: jax.Array) -> Adapter:
    """Add the gradients of rows `first` to `end` one after the other."""

    def row_of(gradient: jax.Array, row: jax.Array, axis: int) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(gradient, row, axis, keepdims=False)

    def add_row(row: jax.Array, total: Adapter) -> Adapter:
        blocks = jax.tree.map(lambda t, g: t + row_of(g, row, 1), total.blocks, gradients.blocks)
        return Adapter(blocks, jax.tree.map(lambda t, g: t + row_of(g, row, 0), total.head, gradients.head))

    return jax.lax.fori_loop(first, end, add_row, total)


def _deeper(columns: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: value[..., None] for name, value in columns.items()}
