"""Lanes in groups of fixed size: a group is one batch of one compiled program, whatever its lanes do.

The lanes of a group are in blocks that have one adapter each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx.models.decoder import Params
from tx.models.lora import Adapter, Rows
from tx.tinker.backends import requests
from tx.tinker.backends.jax.decoding import Lanes
from tx.tinker.types import MOST_STOP_TOKENS, Sample, TopLogprobs

LANES_OF_BLOCK = 4


@dataclass(frozen=True, eq=False)
class SamplerWeights:
    """What to sample from. It never changes: training makes new arrays."""

    params: Params
    adapter: Adapter | None = None
    scale: float = 1.0

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What can be in one batch: the same parameters, and adapters of the same shapes."""
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(self.adapter))
        return (id(self.params), jax.tree.structure(self.adapter), shapes)


@dataclass(slots=True, eq=False)
class Ongoing(requests.Ongoing[SamplerWeights]):
    """A request on its way, and where its prompt is."""

    shared: list[int] = field(default_factory=list)  # pages of the prompt but for its last token, once it is read


@dataclass(slots=True, eq=False)
class Lane:
    """A sample on its way."""

    request: Ongoing
    number: int  # of the sample
    pages: list[int]  # in order, shared ones first
    position: int
    last: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def sample(self, *, is_stopped: bool) -> Sample:
        """What it has chosen."""
        k = self.request.ask.n_top_sampled
        top = TopLogprobs(*(np.stack([pair[i][:k] for pair in self.top]) for i in (0, 1))) if k else None
        return Sample(self.tokens, self.logprobs, is_stopped, top)


class Group:
    """Lanes that are one batch."""

    def __init__(self, kind: tuple[Any, ...], weights: SamplerWeights, n_lanes: int) -> None:
        self.kind = kind
        self._vocabulary = weights.params.embed.shape[0]
        self.params = weights.params
        self.lanes: list[Lane | None] = [None] * n_lanes
        self._size = math.gcd(n_lanes, LANES_OF_BLOCK)
        n_blocks = n_lanes // self._size
        self._blocks = [weights] * n_blocks
        self.rows: Rows | None = None
        if weights.adapter is not None:
            self.rows = _repeated(weights.adapter, np.float32(weights.scale), n_blocks)

    @property
    def used(self) -> Iterator[tuple[int, Lane]]:
        """The lanes that are in use, with their places."""
        return ((place, lane) for place, lane in enumerate(self.lanes) if lane is not None)

    def place_for(self, weights: SamplerWeights) -> int | None:
        """A free lane, in a block that has these weights already, or else in one that has no lane in use."""
        blocks = [self.lanes[start : start + self._size] for start in range(0, len(self.lanes), self._size)]
        having = [i for i, lanes in enumerate(blocks) if self._blocks[i] is weights and None in lanes]
        chosen = next(iter(having), None)
        if chosen is None:
            chosen = next((i for i, lanes in enumerate(blocks) if not any(lanes)), None)
        return None if chosen is None else chosen * self._size + blocks[chosen].index(None)

    def put(self, lane: Lane, place: int) -> None:
        """Let a sample run in a place."""
        self.lanes[place] = lane
        block, weights = place // self._size, lane.request.weights
        if self._blocks[block] is not weights:
            self._blocks[block] = weights
            if self.rows is not None:
                self.rows = _set_block(self.rows, weights.adapter, np.float32(weights.scale), np.int32(block))

    def lanes_for(self, table_size: int) -> Lanes:
        """Where all lanes are; each has a table of so many pages."""
        n = len(self.lanes)
        lanes = Lanes(
            tokens=np.zeros(n, np.int32),
            positions=np.full(n, -1, np.int32),
            n_left=np.zeros(n, np.int32),
            tables=np.zeros((n, table_size), np.int32),
            stops=np.full((n, MOST_STOP_TOKENS), -1, np.int32),
            temperatures=np.ones(n, np.float32),
            top_k=np.full(n, self._vocabulary, np.int32),
            top_p=np.ones(n, np.float32),
            seeds=np.zeros(n, np.uint32),
            numbers=np.zeros(n, np.int32),
        )
        for place, lane in self.used:
            params = lane.request.ask.params
            lanes.tokens[place], lanes.positions[place] = lane.last, lane.position
            lanes.n_left[place] = params.max_tokens - len(lane.tokens)
            lanes.tables[place, : len(lane.pages)] = lane.pages
            lanes.stops[place, : len(params.stop_tokens)] = params.stop_tokens
            lanes.temperatures[place], lanes.top_p[place] = params.temperature, params.top_p
            if params.top_k > 0:
                lanes.top_k[place] = params.top_k
            lanes.seeds[place], lanes.numbers[place] = lane.request.seed & 0xFFFFFFFF, lane.number
        return lanes


@partial(jax.jit, static_argnames="n_blocks")
def _repeated(adapter: Adapter, scale: jax.Array, n_blocks: int) -> Rows:
    """The same for all blocks."""
    blocks = jax.tree.map(lambda one: jnp.repeat(one[:, None], n_blocks, axis=1), adapter.blocks)
    head = jax.tree.map(lambda one: jnp.repeat(one[None], n_blocks, axis=0), adapter.head)
    return Rows(Adapter(blocks, head), jnp.full(n_blocks, scale))


@partial(jax.jit, donate_argnums=0)
def _set_block(rows: Rows, adapter: Adapter, scale: jax.Array, block: jax.Array) -> Rows:
    blocks = jax.tree.map(lambda every, one: every.at[:, block].set(one), rows.adapter.blocks, adapter.blocks)
    head = jax.tree.map(lambda every, one: every.at[block].set(one), rows.adapter.head, adapter.head)
    return Rows(Adapter(blocks, head), rows.scales.at[block].set(scale))
