"""Continuous batching: requests join and leave the running batch between bursts of a few tokens.

The lanes are in groups of fixed size. A group is one batch of one compiled program, whatever its lanes do, and a lane's
tokens do not depend on the others: not on how many there are, nor on their lengths, nor on their adapters. The lanes of
a group are in blocks that have one adapter each.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx.models.config import ModelConfig
from tx.models.decoder import Params
from tx.models.lora import Adapter, Rows, rows_of
from tx.tinker.backends.jax import decoding
from tx.tinker.backends.jax.decoding import MOST_STEPS, Lanes
from tx.tinker.backends.jax.pages import Pages
from tx.tinker.backends.jax.training import bucket
from tx.tinker.types import MOST_STOP_TOKENS, MOST_TOP, Sample, SampleRequest, SampleResult, TopLogprobs

PAGE_SIZE = 64
READ_AT_ONCE = 512  # tokens of a prompt
LANES_OF_BLOCK = 4


@dataclass(frozen=True, slots=True, eq=False)
class SamplerWeights:
    """What to sample from. It never changes: training makes new arrays."""

    params: Params
    adapter: Adapter | None = None
    scale: float = 1.0

    @property
    def kind(self) -> tuple[Any, ...]:
        """What can be in one batch: the same parameters, and adapters of the same shapes."""
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(self.adapter))
        return (id(self.params), jax.tree.structure(self.adapter), shapes)


@dataclass(slots=True, eq=False)
class _Request:
    """A request on its way."""

    ask: SampleRequest
    weights: SamplerWeights
    done: Callable[[SampleResult], None]
    seed: int
    samples: list[Sample | None]
    n_begun: int = 0
    shared: list[int] = field(default_factory=list)  # pages of the prompt but for its last token
    is_read: bool = False
    prompt_logprobs: np.ndarray | None = None
    top_prompt: TopLogprobs | None = None
    is_cancelled: bool = False

    @property
    def n_read(self) -> int:
        """Tokens of the prompt that are read before any is chosen: all but the last."""
        return len(self.ask.prompt) - 1


@dataclass(slots=True, eq=False)
class _Lane:
    """A sample on its way."""

    request: _Request
    number: int  # of the sample
    pages: list[int]  # in order, shared ones first
    position: int
    last: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


class _Group:
    """Lanes that are one batch."""

    def __init__(self, kind: tuple[Any, ...], weights: SamplerWeights, n_lanes: int) -> None:
        self.kind = kind
        self.params = weights.params
        self.lanes: list[_Lane | None] = [None] * n_lanes
        self._size = math.gcd(n_lanes, LANES_OF_BLOCK)
        self._blocks: list[SamplerWeights | None] = [None] * (n_lanes // self._size)
        self.rows: Rows | None = None
        if weights.adapter is not None:
            self.rows = _empty_rows(weights.adapter, len(self._blocks))

    @property
    def used(self) -> Iterator[tuple[int, _Lane]]:
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

    def put(self, lane: _Lane, place: int) -> None:
        """Let a sample run in a place."""
        self.lanes[place] = lane
        block, weights = place // self._size, lane.request.weights
        if self._blocks[block] is not weights:
            self._blocks[block] = weights
            if self.rows is not None:
                self.rows = _set_block(self.rows, weights.adapter, jnp.float32(weights.scale), jnp.int32(block))


class Sampler:
    """All requests of a backend. `step` does a little of what there is to do."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        n_tokens: int,
        n_lanes: int,
        most_groups: int,
        dtype: Any,
        ends_with: Callable[[Sequence[int], Sequence[str]], bool],
    ) -> None:
        """`n_tokens`: of the cache. `ends_with`: whether tokens, decoded, hold one of some strings."""
        n_pages = max(1, n_tokens // PAGE_SIZE)
        self._config = config
        self._n_lanes, self._most_groups = n_lanes, most_groups
        self._pages = Pages(n_pages, PAGE_SIZE)
        self._table_size = self._pages.n_for(min(config.max_positions, n_pages * PAGE_SIZE))
        self._cache = decoding.new_cache(config, n_pages, PAGE_SIZE, dtype)
        self._waiting: deque[_Request] = deque()
        self._groups: list[_Group] = []
        self._ends_with = ends_with
        self.longest = self._table_size * PAGE_SIZE

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._groups

    @property
    def n_running(self) -> int:
        """Samples on their way."""
        return sum(1 for group in self._groups for _ in group.used)

    @property
    def n_waiting(self) -> int:
        """Requests that have not begun, or not all of whose samples have."""
        return len(self._waiting)

    def add(
        self, ask: SampleRequest, weights: SamplerWeights, done: Callable[[SampleResult], None]
    ) -> Callable[[], None]:
        """Take a request, which the caller has checked; `done` gets its result. Returns what cancels it."""
        seed = ask.params.seed if ask.params.seed is not None else secrets.randbits(31)
        request = _Request(ask, weights, done, seed, [None] * ask.n_samples)
        self._waiting.append(request)
        return lambda: setattr(request, "is_cancelled", True)

    def step(self) -> None:
        """Let waiting samples begin where there is room, and choose a few tokens in every group."""
        self._drop_cancelled()
        while self._waiting and self._begin(self._waiting[0]):
            if self._waiting[0].n_begun == self._waiting[0].ask.n_samples:
                self._waiting.popleft()
        for group in self._groups:
            self._choose(group)
        self._groups = [group for group in self._groups if any(group.lanes)]

    # -- beginning

    def _begin(self, request: _Request) -> bool:
        """Let the next sample of a request begin; False where there is no room."""
        ask = request.ask
        n_shared_tokens = request.n_read // PAGE_SIZE * PAGE_SIZE
        n_own = self._pages.n_for(len(ask.prompt) + ask.params.max_tokens - 1) - n_shared_tokens // PAGE_SIZE
        n_prompt = 0 if request.is_read else self._pages.n_for(request.n_read)
        if self._pages.n_free < n_own + n_prompt:
            return False
        group, place = self._place_for(request)
        if group is None:
            return False
        if not request.is_read:
            self._read(request)
        whole = request.shared[: n_shared_tokens // PAGE_SIZE]
        own = self._pages.take(n_own)
        self._pages.share(whole)
        if request.n_read % PAGE_SIZE:
            self._cache = decoding.copy_page(self._cache, jnp.int32(request.shared[-1]), jnp.int32(own[0]))
        lane = _Lane(request, request.n_begun, whole + own, request.n_read, int(ask.prompt[-1]))
        group.put(lane, place)
        request.n_begun += 1
        if request.n_begun == ask.n_samples:
            self._pages.give_back(request.shared)
            request.shared = []
        return True

    def _place_for(self, request: _Request) -> tuple[_Group | None, int]:
        kind = (*request.weights.kind, request.ask.n_top_sampled > 0)
        for group in self._groups:
            place = group.place_for(request.weights) if group.kind == kind else None
            if place is not None:
                return group, place
        if len(self._groups) == self._most_groups:
            return None, -1
        self._groups.append(_Group(kind, request.weights, self._n_lanes))
        return self._groups[-1], 0

    def _read(self, request: _Request) -> None:
        """Put the prompt but for its last token into the cache, by itself, so that others change nothing of it."""
        ask, weights = request.ask, request.weights
        request.is_read = True
        request.shared = self._pages.take(self._pages.n_for(request.n_read))
        table = self._table(request.shared)[None]
        rows = None if weights.adapter is None else rows_of([weights.adapter], jnp.float32([weights.scale]))
        tells = ask.wants_prompt_logprobs or ask.n_top_prompt > 0
        n_top = None if not tells else (MOST_TOP if ask.n_top_prompt else 0)
        prompt = np.asarray(ask.prompt, np.int32)
        found: list[tuple[np.ndarray, ...]] = []
        for start in range(0, request.n_read, READ_AT_ONCE):
            n = min(READ_AT_ONCE, request.n_read - start)
            tokens, targets = np.zeros((2, 1, bucket(n)), np.int32)
            positions = np.full((1, bucket(n)), -1, np.int32)
            tokens[0, :n], targets[0, :n] = prompt[start : start + n], prompt[start + 1 : start + n + 1]
            positions[0, :n] = np.arange(start, start + n)
            n_pages = jnp.int32(self._pages.n_for(start + n))
            self._cache, *told = decoding.read_prompt(
                self._config, weights.params, rows, self._cache, tokens, positions, targets, table, n_pages, n_top=n_top
            )
            if tells:
                found.append(tuple(np.asarray(one)[:n] for one in told))
        if tells:
            self._note_prompt(request, found)

    def _note_prompt(self, request: _Request, found: Sequence[tuple[np.ndarray, ...]]) -> None:
        n_prompt, k = len(request.ask.prompt), request.ask.n_top_prompt
        logprobs = np.full(n_prompt, np.nan, np.float32)
        top_tokens = np.zeros((n_prompt, k), np.int32)
        top = np.full((n_prompt, k), np.nan, np.float32)
        if found:
            logprobs[1:] = np.concatenate([one[0] for one in found])
            if k:
                top_tokens[1:] = np.concatenate([one[1][:, :k] for one in found])
                top[1:] = np.concatenate([one[2][:, :k] for one in found])
        request.prompt_logprobs = logprobs if request.ask.wants_prompt_logprobs else None
        request.top_prompt = TopLogprobs(top_tokens, top) if k else None

    # -- choosing

    def _choose(self, group: _Group) -> None:
        """A burst of tokens in every lane of a group."""
        lanes = self._lanes_of(group)
        n_top = MOST_TOP if any(lane.request.ask.n_top_sampled for _, lane in group.used) else 0
        n_steps = max((int(lanes.n_left[place]) for place, _ in group.used), default=0)
        n_pages = max((self._pages.n_for(lane.position + MOST_STEPS) for _, lane in group.used), default=0)
        self._cache, chosen = decoding.decode(
            self._config,
            group.params,
            group.rows,
            self._cache,
            lanes,
            jnp.int32(min(n_steps, MOST_STEPS)),
            jnp.int32(min(n_pages, self._table_size)),
            n_top=n_top,
        )
        tokens, logprobs = np.asarray(chosen.tokens), np.asarray(chosen.logprobs)
        top = (np.asarray(chosen.top_tokens), np.asarray(chosen.top_logprobs)) if n_top else None
        for place, lane in list(group.used):
            if self._take(lane, place, tokens, logprobs, top):
                group.lanes[place] = None
                self._pages.give_back(lane.pages)

    def _lanes_of(self, group: _Group) -> Lanes:
        n = self._n_lanes
        lanes = Lanes(
            tokens=np.zeros(n, np.int32),
            positions=np.full(n, -1, np.int32),
            n_left=np.zeros(n, np.int32),
            tables=np.zeros((n, self._table_size), np.int32),
            stops=np.full((n, MOST_STOP_TOKENS), -1, np.int32),
            temperatures=np.ones(n, np.float32),
            top_k=np.full(n, self._config.vocab_size, np.int32),
            top_p=np.ones(n, np.float32),
            seeds=np.zeros(n, np.uint32),
            numbers=np.zeros(n, np.int32),
        )
        for place, lane in group.used:
            params = lane.request.ask.params
            lanes.tokens[place], lanes.positions[place] = lane.last, lane.position
            lanes.n_left[place] = params.max_tokens - len(lane.tokens)
            lanes.tables[place] = self._table(lane.pages)
            lanes.stops[place, : len(params.stop_tokens)] = params.stop_tokens
            lanes.temperatures[place], lanes.top_p[place] = params.temperature, params.top_p
            if params.top_k > 0:
                lanes.top_k[place] = params.top_k
            lanes.seeds[place], lanes.numbers[place] = lane.request.seed & 0xFFFFFFFF, lane.number
        return lanes

    def _take(
        self,
        lane: _Lane,
        place: int,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        top: tuple[np.ndarray, np.ndarray] | None,
    ) -> bool:
        """Take what a lane has chosen; whether it is done."""
        params = lane.request.ask.params
        for step in range(MOST_STEPS):
            token = int(tokens[step, place])
            if token < 0:
                return False
            lane.tokens.append(token)
            lane.logprobs.append(float(logprobs[step, place]))
            if lane.request.ask.n_top_sampled and top is not None:
                lane.top.append((top[0][step, place], top[1][step, place]))
            lane.position, lane.last = lane.position + 1, token
            is_stopped = token in params.stop_tokens or (
                bool(params.stop_strings) and self._ends_with(lane.tokens, params.stop_strings)
            )
            if is_stopped or len(lane.tokens) == params.max_tokens or lane.request.is_cancelled:
                self._end(lane, is_stopped)
                return True
        return False

    def _end(self, lane: _Lane, is_stopped: bool) -> None:
        request, k = lane.request, lane.request.ask.n_top_sampled
        top = None
        if k:
            top = TopLogprobs(*(np.stack([pair[i][:k] for pair in lane.top]) for i in (0, 1)))
        request.samples[lane.number] = Sample(lane.tokens, lane.logprobs, is_stopped, top)
        samples = [sample for sample in request.samples if sample is not None]
        if len(samples) == len(request.samples) and not request.is_cancelled:
            request.done(SampleResult(samples, request.prompt_logprobs, request.top_prompt))

    def _drop_cancelled(self) -> None:
        for request in [one for one in self._waiting if one.is_cancelled]:
            self._waiting.remove(request)
            self._pages.give_back(request.shared)

    def _table(self, pages: Sequence[int]) -> np.ndarray:
        table = np.zeros(self._table_size, np.int32)
        table[: len(pages)] = pages
        return table


def _empty_rows(adapter: Adapter, n_blocks: int) -> Rows:
    blocks = jax.tree.map(lambda one: jnp.zeros((one.shape[0], n_blocks, *one.shape[1:]), one.dtype), adapter.blocks)
    head = jax.tree.map(lambda one: jnp.zeros((n_blocks, *one.shape), one.dtype), adapter.head)
    return Rows(Adapter(blocks, head), jnp.zeros(n_blocks))


@partial(jax.jit, donate_argnums=0)
def _set_block(rows: Rows, adapter: Adapter, scale: jax.Array, block: jax.Array) -> Rows:
    blocks = jax.tree.map(lambda every, one: every.at[:, block].set(one), rows.adapter.blocks, adapter.blocks)
    head = jax.tree.map(lambda every, one: every.at[block].set(one), rows.adapter.head, adapter.head)
    return Rows(Adapter(blocks, head), rows.scales.at[block].set(scale))
