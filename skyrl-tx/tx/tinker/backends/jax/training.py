"""Forward and backward passes over micro-batches.

A micro-batch holds data of a single pass, and its shape depends only on that data, so training gives bitwise the same
results alone and alongside other models, and needs no memory for their adapters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tx.models.config import ModelConfig
from tx.models.decoder import Params, hidden_states, logits_of
from tx.models.lora import Adapter, BatchAdapters, rows_of
from tx.tinker.losses import LOSSES, token_losses
from tx.tinker.types import Datum

MIN_LENGTH = 32
MAX_LOGITS = 1 << 24
"""Maximum number of logits computed at once. More are computed in chunks, and again in the backward pass."""

NAMES = tuple(LOSSES)
INPUTS = sorted({name for loss in LOSSES.values() for name in (*loss.needs, *loss.optional)})
SETTINGS = sorted({name for loss in LOSSES.values() for name in loss.settings})

XP = SimpleNamespace(exp=jnp.exp, clip=jnp.clip, where=jnp.where, sum=jnp.sum, stop_gradient=jax.lax.stop_gradient)


class ScaledAdapter(NamedTuple):
    """The trained adapter and its scale."""

    adapter: Adapter
    scale: jax.Array  # ()


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """The shape that a program is compiled for."""

    n_rows: int
    length: int
    n_targets: int  # per position. 0: one, without its own dimension


def bucket(length: int) -> int:
    """Round a length up to one that programs are compiled for: 32, 48, 64, 96, 128, … and multiples of 512 beyond."""
    size = MIN_LENGTH
    while size < length:
        if size >= 512:
            return -(-length // 512) * 512
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def micro_batches(data: Sequence[Datum], n_tokens: int) -> Iterator[tuple[MicroBatchShape, list[int]]]:
    """Yield micro-batches of at most `n_tokens` as (shape, data indices). Data of similar length go together.

    Example: lengths 30, 45, 500, 31 and 29 with `n_tokens` 512. Data 0, 3 and 4 have bucket 32, datum 1 has 48, datum 2
    has 512. The micro-batches are 4 × 32 with data [0, 3, 4] and an empty row, 1 × 48 with [1], and 1 × 512 with [2].
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for i, datum in enumerate(data):
        targets = datum.inputs["target_tokens"]
        n_targets = 0 if targets.ndim == 1 else targets.shape[1]
        alike.setdefault((bucket(len(datum.tokens)), n_targets), []).append(i)
    for (length, n_targets), numbers in sorted(alike.items()):
        start = 0
        while start < len(numbers):
            n_rows = rows_for(len(numbers) - start, n_tokens // length)
            yield MicroBatchShape(n_rows, length, n_targets), numbers[start : start + n_rows]
            start += n_rows


def rows_for(n_data: int, max_rows: int) -> int:
    """Return the number of rows of the next micro-batch: 1, 4, 16, …, so that few sizes are compiled.

    It is the largest that leaves less than half of the rows empty. A sequence that is too long is a micro-batch by
    itself.
    """
    n_rows = 1
    while 4 * n_rows <= max_rows and 2 * n_data > 4 * n_rows:
        n_rows *= 4
    return n_rows


def pad(data: Sequence[Datum], shape: MicroBatchShape) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return a micro-batch's tokens (M, L) and inputs (M, L) or (M, L, K). Padding is 0, so it has weight 0."""
    tokens = np.zeros((shape.n_rows, shape.length), np.int32)
    size = (shape.n_rows, shape.length, *([shape.n_targets] if shape.n_targets else []))
    inputs = {name: np.zeros(size, np.int32 if name == "target_tokens" else np.float32) for name in INPUTS}
    for row, datum in enumerate(data):
        tokens[row, : len(datum.tokens)] = datum.tokens
        for name, value in datum.inputs.items():
            inputs[name][row, : len(value)] = value
    return tokens, inputs


def target_logprobs(params: Params, rows: BatchAdapters | None, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the log-probs (M, L, K) of targets (M, L, K) after hidden states (M, L, D).

    Masked targets may be any number.
    """
    n_rows, length, _ = hidden.shape
    vocabulary = params.unembed.shape[1]
    n_chunks = 1
    while n_rows * length * vocabulary > n_chunks * MAX_LOGITS and n_chunks < length:
        n_chunks *= 2
    if length % n_chunks:
        n_chunks = length

    def score_chunk(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        logits = logits_of(params, rows, hidden)
        chosen = jnp.take_along_axis(logits, jnp.clip(targets, 0, vocabulary - 1), axis=-1)
        return chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    if n_chunks == 1:
        return score_chunk(hidden, targets)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(n_rows, n_chunks, length // n_chunks, x.shape[-1]), 1, 0)

    parts = jax.lax.map(lambda pair: jax.checkpoint(score_chunk)(*pair), (split(hidden), split(targets)))
    return jnp.moveaxis(parts, 0, 1).reshape(targets.shape)


@partial(jax.jit, static_argnames=("config", "has_gradient", "remat"))
def micro_batch(
    config: ModelConfig,
    params: Params,
    lora: ScaledAdapter | None,
    loss: jax.Array,
    tokens: jax.Array,
    inputs: Mapping[str, jax.Array],
    settings: Mapping[str, jax.Array],
    *,
    has_gradient: bool,
    remat: bool,
) -> tuple[jax.Array, jax.Array, Adapter | Params | None]:
    """Return the targets' log-probs and losses, (M, L) or (M, L, K), and the gradients.

    The gradients are of the adapter, or of all parameters if there is none. `loss` is an index into `NAMES`, so that
    all losses share one program.
    """
    targets = inputs["target_tokens"]
    wide = targets if targets.ndim == 3 else targets[..., None]

    def total(trained: Adapter | Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        weights = trained if isinstance(trained, Params) else params
        rows = rows_of([trained], lora.scale[None]) if isinstance(trained, Adapter) and lora is not None else None
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = hidden_states(config, weights, rows, tokens, positions, remat=remat)
        lp = target_logprobs(weights, rows, hidden, wide).reshape(targets.shape)
        losses = jax.lax.switch(loss, [partial(_losses, name, inputs, settings) for name in NAMES], lp)
        return losses.sum(), (lp, losses)

    trained = params if lora is None else lora.adapter
    if not has_gradient:
        _, (lp, losses) = total(trained)
        return lp, losses, None
    gradients, (lp, losses) = jax.grad(total, has_aux=True)(trained)
    wide = jax.tree.map(lambda array: array.astype(jnp.float32), gradients)  # passes accumulate many gradients
    return lp, losses, wide


def _losses(name: str, inputs: Mapping[str, jax.Array], settings: Mapping[str, jax.Array], lp: jax.Array) -> jax.Array:
    loss = LOSSES[name]
    loss_inputs = {key: inputs[key] for key in (*loss.needs, "weights") if key != "target_tokens"}
    return token_losses(name, XP, lp, loss_inputs, {key: settings[key] for key in loss.settings})


@partial(jax.jit, donate_argnums=0)
def add(total: Adapter | Params, gradients: Adapter | Params) -> Adapter | Params:
    """Add gradients in place to the first argument."""
    return jax.tree.map(jnp.add, total, gradients)
