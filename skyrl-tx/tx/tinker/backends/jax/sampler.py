"""Continuous batching: requests join and leave the running batch between bursts of a few tokens.

A sample's tokens do not depend on the number of other samples, their lengths or their adapters.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tx.models.config import ModelConfig
from tx.models.lora import rows_of
from tx.tinker.backends.jax import decoding
from tx.tinker.backends.jax.decoding import MAX_STEPS
from tx.tinker.backends.jax.groups import JaxGroup, JaxLane, JaxRequestState, SamplerWeights
from tx.tinker.backends.jax.pages import Pages
from tx.tinker.backends.jax.training import bucket
from tx.tinker.backends.requests import TurnQueue
from tx.tinker.types import MAX_TOP, SampleRequest, SampleResult

PAGE_SIZE = 64
PROMPT_CHUNK = 512  # tokens of a prompt chunk


class JaxSampler:
    """The JAX backend's sampler. `step` does a slice of the work."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        n_tokens: int,
        n_lanes: int,
        max_groups: int,
        dtype: Any,
        mesh: Mesh,
        ends_with: Callable[[Sequence[int], Sequence[str]], bool],
    ) -> None:
        """Create a sampler with a cache of `n_tokens`. `ends_with` finds strings at the end of decoded tokens."""
        n_pages = max(2, n_tokens // PAGE_SIZE)
        self._config = config
        self._max_top = min(MAX_TOP, config.vocab_size)
        self._n_lanes, self._max_groups = n_lanes, max_groups
        self._pages = Pages(n_pages, PAGE_SIZE)
        self._table_size = self._pages.n_pages_for(min(config.max_positions, (n_pages - 1) * PAGE_SIZE))
        self._cache = decoding.new_cache(config, n_pages, PAGE_SIZE, dtype, mesh)
        self._waiting: TurnQueue[JaxRequestState] = TurnQueue()
        self._copies: list[tuple[int, int]] = []  # pages to copy: from, to
        self._groups: list[JaxGroup] = []
        self._ends_with = ends_with
        self.max_length = self._table_size * PAGE_SIZE

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do."""
        return not self._waiting and not self._groups

    @property
    def n_running(self) -> int:
        """Number of running samples."""
        return sum(1 for group in self._groups for _ in group.used)

    @property
    def n_waiting(self) -> int:
        """Number of requests with samples that have not started."""
        return len(self._waiting)

    @property
    def n_free_pages(self) -> int:
        """Number of free cache pages."""
        return self._pages.n_free

    def add(
        self, spec: SampleRequest, weights: SamplerWeights, done: Callable[[SampleResult], None]
    ) -> Callable[[], None]:
        """Queue a validated request. Return a function that cancels it. `done` gets the result."""
        return self._waiting.add(JaxRequestState(spec, weights, done))

    def step(self) -> None:
        """Begin waiting samples that fit, and sample a few tokens in every group."""
        for request in self._waiting.take_cancelled():
            self._evict_prompt(request)
        self._waiting.begin(self._begin)
        self._copy()
        for group in self._groups:
            self._choose(group)
        self._groups = [group for group in self._groups if any(group.lanes)]

    # -- begin

    def _begin(self, request: JaxRequestState) -> bool:
        """Begin a request's next sample. Return False if it does not fit."""
        n_pages = self._n_needed(request)
        idle: list[
            JaxRequestState
        ] = []  # requests whose prompts can be evicted and prefilled again, last in turn first
        if n_pages > self._pages.n_free:
            others = (other for other in reversed(self._waiting) if other is not request)
            idle = [other for other in others if other.shared and not other.n_running]
        if n_pages > self._pages.n_free + sum(len(group.shared) for group in idle):
            return False
        group, index = self._find_lane(request)
        if group is None:
            return False
        while n_pages > self._pages.n_free:
            self._evict_prompt(idle.pop(0))
        if not request.shared:
            self._read(request)
        pages = self._take_pages(request)
        group.put(JaxLane(request, request.n_begun, pages, request.n_prefilled, int(request.spec.prompt[-1])), index)
        request.n_begun += 1
        return True

    def _evict_prompt(self, request: JaxRequestState) -> None:
        self._pages.release(request.shared)
        request.shared = []

    def _n_needed(self, request: JaxRequestState) -> int:
        """Return the number of free pages for the next sample, and for its prompt if the prompt is not cached.

        `_take_pages` explains the sharing. The first of several samples also copies the prompt's last page, so the
        longest possible sample is one page shorter than the cache.
        """
        n_whole, n_prompt = request.n_prefilled // PAGE_SIZE, self._pages.n_pages_for(request.n_prefilled)
        n_shared = n_prompt if request.n_left == 1 else n_whole
        n_own = self._pages.n_pages_for(request.n_prefilled + request.spec.params.max_tokens) - n_shared
        return n_own if request.shared else n_own + n_prompt

    def _take_pages(self, request: JaxRequestState) -> list[int]:
        """Allocate a sample's pages: the prompt's, and pages for all tokens except the last, which is never read.

        Example: 3 samples of 60 tokens after a prompt of 100 (99 of them prefilled). Each sample needs 159 tokens,
        or 3 pages of 64. The request owns the prompt's pages 0 and 1. Page 0 is full, so all samples share it. Each
        needs its own copy of page 1, because its tokens follow there. The first gets page 0, a copy of page 1 and a new
        page: [0, 2, 3]. The second gets [0, 4, 5]. The third takes page 1 itself, since no sample follows: [0, 1, 6].
        The request then owns no pages.
        """
        n_own = self._n_needed(request)
        if request.n_left == 1:
            shared, request.shared = request.shared, []
            return shared + self._pages.take(n_own)
        n_whole = request.n_prefilled // PAGE_SIZE
        whole, part = request.shared[:n_whole], request.shared[n_whole:]
        own = self._pages.take(n_own)
        self._pages.share(whole)
        self._copies.extend(zip(part, own, strict=False))  # at most one page
        return whole + own

    def _copy(self) -> None:
        """Copy partially filled prompt pages to the samples that begin."""
        unused_page = self._pages.n_pages
        for start in range(0, len(self._copies), self._n_lanes):
            copies = self._copies[start : start + self._n_lanes]
            copies += [(unused_page, unused_page)] * (self._n_lanes - len(copies))
            sources, targets = np.asarray(copies, np.int32).T
            self._cache = decoding.copy_pages(self._cache, sources, targets)
        self._copies = []

    def _find_lane(self, request: JaxRequestState) -> tuple[JaxGroup | None, int]:
        kind = (*request.weights.kind, request.spec.n_top_sampled > 0)
        for group in self._groups:
            index = group.find_lane(request.weights) if group.kind == kind else None
            if index is not None:
                return group, index
        if len(self._groups) == self._max_groups:
            return None, -1
        self._groups.append(JaxGroup(kind, request.weights, self._n_lanes))
        return self._groups[-1], 0

    def _read(self, request: JaxRequestState) -> None:
        """Prefill the prompt without its last token, separately from other prompts, so they cannot influence it."""
        spec, weights = request.spec, request.weights
        request.shared = self._pages.take(self._pages.n_pages_for(request.n_prefilled))
        table = np.zeros((1, self._table_size), np.int32)
        table[0, : len(request.shared)] = request.shared
        rows = None if weights.adapter is None else rows_of([weights.adapter], np.full(1, weights.scale, np.float32))
        needs_logprobs = request.needs_logprobs
        n_top = None if not needs_logprobs else (self._max_top if spec.n_top_prompt else 0)
        prompt = np.asarray(spec.prompt, np.int32)
        found: list[tuple[np.ndarray, ...]] = []
        for start in range(0, request.n_prefilled, PROMPT_CHUNK):
            n = min(PROMPT_CHUNK, request.n_prefilled - start)
            tokens, targets = np.zeros((2, 1, bucket(n)), np.int32)
            positions = np.full((1, bucket(n)), -1, np.int32)
            tokens[0, :n], targets[0, :n] = prompt[start : start + n], prompt[start + 1 : start + n + 1]
            positions[0, :n] = np.arange(start, start + n)
            n_pages = np.int32(self._pages.n_pages_for(start + n))
            self._cache, *scores = decoding.read_prompt(
                self._config, weights.params, rows, self._cache, tokens, positions, targets, table, n_pages, n_top=n_top
            )
            if needs_logprobs:
                found.append(tuple(np.asarray(array)[:n] for array in scores))
        if needs_logprobs:
            request.record_prompt(found)

    # -- sample

    def _choose(self, group: JaxGroup) -> None:
        """Sample a burst of tokens in every lane of a group."""
        lanes = group.lanes_for(self._table_size)
        n_top = self._max_top if any(lane.request.spec.n_top_sampled for _, lane in group.used) else 0
        n_steps = max((int(lanes.n_left[index]) for index, _ in group.used), default=0)
        n_pages = max((self._pages.n_pages_for(lane.position + MAX_STEPS) for _, lane in group.used), default=0)
        self._cache, chosen = decoding.decode(
            self._config,
            group.params,
            group.rows,
            self._cache,
            lanes,
            np.int32(min(n_steps, MAX_STEPS)),
            np.int32(min(n_pages, self._table_size)),
            n_top=n_top,
        )
        tokens, logprobs = (np.asarray(array).T.tolist() for array in (chosen.tokens, chosen.logprobs))
        top = (np.asarray(chosen.top_tokens), np.asarray(chosen.top_logprobs)) if n_top else None
        for index, lane in list(group.used):
            if self._take(lane, index, tokens[index], logprobs[index], top):
                group.lanes[index] = None
                self._pages.release(lane.pages)

    def _take(
        self,
        lane: JaxLane,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top: tuple[np.ndarray, np.ndarray] | None,
    ) -> bool:
        """Append a lane's tokens to its sample. Return True if the sample is done."""
        params = lane.request.spec.params
        for step, token in enumerate(tokens):
            if token < 0:
                return False
            lane.tokens.append(token)
            lane.logprobs.append(logprobs[step])
            if lane.request.spec.n_top_sampled and top is not None:
                lane.top.append((top[0][step, index], top[1][step, index]))
            lane.position, lane.last = lane.position + 1, token
            is_stopped = token in params.stop_tokens or (
                bool(params.stop_strings) and self._ends_with(lane.tokens, params.stop_strings)
            )
            if is_stopped or len(lane.tokens) == params.max_tokens or lane.request.is_cancelled:
                lane.request.end(lane.number, lane.sample(is_stopped=is_stopped))
                return True
        return False
