"""Groups of lanes. A group has a fixed size, because it is one batch of one compiled program. Its lanes are in blocks,
and a block shares an adapter.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx.models.decoder import Params
from tx.models.lora import Adapter, BatchAdapters
from tx.tinker.backends import requests
from tx.tinker.backends.jax.decoding import Lanes
from tx.tinker.types import MAX_STOP_TOKENS, Sample, TopLogprobs

BLOCK_LANES = 4


@dataclass(frozen=True, eq=False)
class SamplerWeights:
    """Weights to sample from. They are immutable: training creates new arrays."""

    params: Params
    adapter: Adapter | None = None
    scale: float = 1.0

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """Key for batching: equal keys mean the same parameters and adapters of the same shapes."""
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(self.adapter))
        return (id(self.params), jax.tree.structure(self.adapter), shapes)


@dataclass(slots=True, eq=False)
class JaxRequestState(requests.RequestState[SamplerWeights]):
    """A request in progress, with the pages of its prompt."""

    shared: list[int] = field(default_factory=list)  # pages of the prefilled prompt, without its last token


@dataclass(slots=True, eq=False)
class JaxLane:
    """A running sample."""

    request: JaxRequestState
    number: int  # the sample's index
    pages: list[int]  # in order, shared ones first
    position: int
    last: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def sample(self, *, is_stopped: bool) -> Sample:
        """Return the sampled tokens and log-probs."""
        k = self.request.spec.n_top_sampled
        top = TopLogprobs(*(np.stack([pair[i][:k] for pair in self.top]) for i in (0, 1))) if k else None
        return Sample(self.tokens, self.logprobs, is_stopped, top)


class JaxGroup:
    """Lanes that form a batch."""

    def __init__(self, kind: tuple[Any, ...], weights: SamplerWeights, n_lanes: int) -> None:
        self.kind = kind
        self._vocabulary = weights.params.embed.shape[0]
        self.params = weights.params
        self.lanes: list[JaxLane | None] = [None] * n_lanes
        self._size = math.gcd(n_lanes, BLOCK_LANES)
        n_blocks = n_lanes // self._size
        self._blocks = [weights] * n_blocks
        self.rows: BatchAdapters | None = None
        if weights.adapter is not None:
            self.rows = _repeat_adapter(weights.adapter, np.float32(weights.scale), n_blocks)

    @property
    def used(self) -> Iterator[tuple[int, JaxLane]]:
        """Lanes in use, with their indices."""
        return ((index, lane) for index, lane in enumerate(self.lanes) if lane is not None)

    def find_lane(self, weights: SamplerWeights) -> int | None:
        """Return a free lane in a block with these weights, or else in an unused block."""
        blocks = [self.lanes[start : start + self._size] for start in range(0, len(self.lanes), self._size)]
        having = [i for i, lanes in enumerate(blocks) if self._blocks[i] is weights and None in lanes]
        chosen = next(iter(having), None)
        if chosen is None:
            chosen = next((i for i, lanes in enumerate(blocks) if not any(lanes)), None)
        return None if chosen is None else chosen * self._size + blocks[chosen].index(None)

    def put(self, lane: JaxLane, index: int) -> None:
        """Start a sample in a lane."""
        self.lanes[index] = lane
        block, weights = index // self._size, lane.request.weights
        if self._blocks[block] is not weights:
            self._blocks[block] = weights
            if self.rows is not None:
                self.rows = _set_block(self.rows, weights.adapter, np.float32(weights.scale), np.int32(block))

    def lanes_for(self, table_size: int) -> Lanes:
        """Return a decoding call's arguments. Each lane has a table of `table_size` pages."""
        n = len(self.lanes)
        lanes = Lanes(
            tokens=np.zeros(n, np.int32),
            positions=np.full(n, -1, np.int32),
            n_left=np.zeros(n, np.int32),
            tables=np.zeros((n, table_size), np.int32),
            stops=np.full((n, MAX_STOP_TOKENS), -1, np.int32),
            temperatures=np.ones(n, np.float32),
            top_k=np.full(n, self._vocabulary, np.int32),
            top_p=np.ones(n, np.float32),
            seeds=np.zeros(n, np.uint32),
            numbers=np.zeros(n, np.int32),
        )
        for index, lane in self.used:
            params = lane.request.spec.params
            lanes.tokens[index], lanes.positions[index] = lane.last, lane.position
            lanes.n_left[index] = params.max_tokens - len(lane.tokens)
            lanes.tables[index, : len(lane.pages)] = lane.pages
            lanes.stops[index, : len(params.stop_tokens)] = params.stop_tokens
            lanes.temperatures[index], lanes.top_p[index] = lane.request.temperature, params.top_p
            if params.top_k > 0:
                lanes.top_k[index] = params.top_k
            lanes.seeds[index], lanes.numbers[index] = lane.request.seed & 0xFFFFFFFF, lane.number
        return lanes


@partial(jax.jit, static_argnames="n_blocks")
def _repeat_adapter(adapter: Adapter, scale: jax.Array, n_blocks: int) -> BatchAdapters:
    """Repeat an adapter for all blocks."""
    blocks = jax.tree.map(lambda factor: jnp.repeat(factor[:, None], n_blocks, axis=1), adapter.blocks)
    head = jax.tree.map(lambda factor: jnp.repeat(factor[None], n_blocks, axis=0), adapter.head)
    return BatchAdapters(Adapter(blocks, head), jnp.full(n_blocks, scale))


@partial(jax.jit, donate_argnums=0)
def _set_block(rows: BatchAdapters, adapter: Adapter, scale: jax.Array, block: jax.Array) -> BatchAdapters:
    blocks = jax.tree.map(lambda every, factor: every.at[:, block].set(factor), rows.adapter.blocks, adapter.blocks)
    head = jax.tree.map(lambda every, factor: every.at[block].set(factor), rows.adapter.head, adapter.head)
    return BatchAdapters(Adapter(blocks, head), rows.scales.at[block].set(scale))
