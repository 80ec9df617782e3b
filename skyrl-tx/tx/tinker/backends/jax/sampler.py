"""Continuous batching: requests join and leave the running batch between bursts of a few tokens.

A sample's tokens do not depend on the others: not on how many there are, nor on their lengths, nor on their adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tx.models.config import ModelConfig
from tx.models.lora import rows_of
from tx.tinker.backends.jax import decoding
from tx.tinker.backends.jax.decoding import MOST_STEPS
from tx.tinker.backends.jax.groups import Group, Lane, Ongoing, SamplerWeights
from tx.tinker.backends.jax.pages import Pages
from tx.tinker.backends.jax.training import bucket
from tx.tinker.backends.requests import Turns
from tx.tinker.types import MOST_TOP, SampleRequest, SampleResult

PAGE_SIZE = 64
READ_AT_ONCE = 512  # tokens of a prompt


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
        mesh: Mesh,
        ends_with: Callable[[Sequence[int], Sequence[str]], bool],
    ) -> None:
        """`n_tokens`: of the cache. `ends_with`: whether tokens, decoded, hold one of some strings."""
        n_pages = max(2, n_tokens // PAGE_SIZE)
        self._config = config
        self._n_lanes, self._most_groups = n_lanes, most_groups
        self._pages = Pages(n_pages, PAGE_SIZE)
        self._table_size = self._pages.n_for(min(config.max_positions, (n_pages - 1) * PAGE_SIZE))
        self._cache = decoding.new_cache(config, n_pages, PAGE_SIZE, dtype, mesh)
        self._waiting: Turns[Ongoing] = Turns()
        self._copies: list[tuple[int, int]] = []  # of pages, from and to
        self._groups: list[Group] = []
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

    @property
    def n_free_pages(self) -> int:
        """Pages of the cache that nobody uses."""
        return self._pages.n_free

    def add(
        self, ask: SampleRequest, weights: SamplerWeights, done: Callable[[SampleResult], None]
    ) -> Callable[[], None]:
        """Take a request, which the caller has checked; `done` gets its result. Returns what cancels it."""
        return self._waiting.add(Ongoing(ask, weights, done))

    def step(self) -> None:
        """Let waiting samples begin where there is room, and choose a few tokens in every group."""
        for request in self._waiting.take_cancelled():
            self._forget_prompt(request)
        self._waiting.begin(self._begin)
        self._copy()
        for group in self._groups:
            self._choose(group)
        self._groups = [group for group in self._groups if any(group.lanes)]

    # -- beginning

    def _begin(self, request: Ongoing) -> bool:
        """Let the next sample of a request begin; False where there is no room."""
        n_pages = self._n_needed(request)
        idle = [] if n_pages <= self._pages.n_free else self._idle_prompts(request)
        if n_pages > self._pages.n_free + sum(len(one.shared) for one in idle):
            return False
        group, place = self._place_for(request)
        if group is None:
            return False
        while n_pages > self._pages.n_free:
            self._forget_prompt(idle.pop(0))
        if not request.shared:
            self._read(request)
        pages = self._take_pages(request)
        group.put(Lane(request, request.n_begun, pages, request.n_read, int(request.ask.prompt[-1])), place)
        request.n_begun += 1
        return True

    def _idle_prompts(self, but: Ongoing) -> list[Ongoing]:
        """Other requests whose prompts nobody uses now, those first whose turn comes last. They can be read again."""
        return [one for one in reversed(self._waiting) if one is not but and one.shared and not one.n_running]

    def _forget_prompt(self, request: Ongoing) -> None:
        self._pages.give_back(request.shared)
        request.shared = []

    def _n_needed(self, request: Ongoing) -> int:
        """Pages that the next sample takes from the free ones: see `_take_pages`; and its prompt's, unless it is read.

        The first of several samples takes one more than it will have, its prompt's last one: so the longest sample has
        a page less than the cache.
        """
        n_whole, n_prompt = request.n_read // PAGE_SIZE, self._pages.n_for(request.n_read)
        n_shared = n_prompt if request.n_left == 1 else n_whole
        n_own = self._pages.n_for(request.n_read + request.ask.params.max_tokens) - n_shared
        return n_own if request.shared else n_own + n_prompt

    def _take_pages(self, request: Ongoing) -> list[int]:
        """The prompt's pages, and others for all tokens that may follow, but for the last one, which is never read.

        Take 3 samples of 60 tokens after a prompt of 100, of which 99 are read first: each has 159 tokens on 3 pages of
        64. The prompt is on pages 0 and 1, which are the request's. All samples read 0, which is full; but what follows
        the prompt on page 1 is another for each. So the first has 0, a copy of 1 and a new page, [0, 2, 3]; the second
        [0, 4, 5]; and the third, since no more will begin, 1 itself: [0, 1, 6]. The request then has none any more.
        """
        n_own = self._n_needed(request)
        if request.n_left == 1:
            shared, request.shared = request.shared, []
            return shared + self._pages.take(n_own)
        n_whole = request.n_read // PAGE_SIZE
        whole, part = request.shared[:n_whole], request.shared[n_whole:]
        own = self._pages.take(n_own)
        self._pages.share(whole)
        self._copies.extend(zip(part, own, strict=False))  # at most one page
        return whole + own

    def _copy(self) -> None:
        """Give the samples that begin what their prompts have on a page of which they will need the rest."""
        nowhere = self._pages.n_pages
        for start in range(0, len(self._copies), self._n_lanes):
            some = self._copies[start : start + self._n_lanes]
            some += [(nowhere, nowhere)] * (self._n_lanes - len(some))
            sources, targets = np.asarray(some, np.int32).T
            self._cache = decoding.copy_pages(self._cache, sources, targets)
        self._copies = []

    def _place_for(self, request: Ongoing) -> tuple[Group | None, int]:
        kind = (*request.weights.kind, request.ask.n_top_sampled > 0)
        for group in self._groups:
            place = group.place_for(request.weights) if group.kind == kind else None
            if place is not None:
                return group, place
        if len(self._groups) == self._most_groups:
            return None, -1
        self._groups.append(Group(kind, request.weights, self._n_lanes))
        return self._groups[-1], 0

    def _read(self, request: Ongoing) -> None:
        """Put the prompt but for its last token into the cache, by itself, so that others change nothing of it."""
        ask, weights = request.ask, request.weights
        request.shared = self._pages.take(self._pages.n_for(request.n_read))
        table = self._table(request.shared)[None]
        rows = None if weights.adapter is None else rows_of([weights.adapter], np.full(1, weights.scale, np.float32))
        tells = request.needs_logprobs
        n_top = None if not tells else (MOST_TOP if ask.n_top_prompt else 0)
        prompt = np.asarray(ask.prompt, np.int32)
        found: list[tuple[np.ndarray, ...]] = []
        for start in range(0, request.n_read, READ_AT_ONCE):
            n = min(READ_AT_ONCE, request.n_read - start)
            tokens, targets = np.zeros((2, 1, bucket(n)), np.int32)
            positions = np.full((1, bucket(n)), -1, np.int32)
            tokens[0, :n], targets[0, :n] = prompt[start : start + n], prompt[start + 1 : start + n + 1]
            positions[0, :n] = np.arange(start, start + n)
            n_pages = np.int32(self._pages.n_for(start + n))
            self._cache, *told = decoding.read_prompt(
                self._config, weights.params, rows, self._cache, tokens, positions, targets, table, n_pages, n_top=n_top
            )
            if tells:
                found.append(tuple(np.asarray(one)[:n] for one in told))
        if tells:
            request.note_prompt(found)

    # -- choosing

    def _choose(self, group: Group) -> None:
        """A burst of tokens in every lane of a group."""
        lanes = group.lanes_for(self._table_size)
        n_top = MOST_TOP if any(lane.request.ask.n_top_sampled for _, lane in group.used) else 0
        n_steps = max((int(lanes.n_left[place]) for place, _ in group.used), default=0)
        n_pages = max((self._pages.n_for(lane.position + MOST_STEPS) for _, lane in group.used), default=0)
        self._cache, chosen = decoding.decode(
            self._config,
            group.params,
            group.rows,
            self._cache,
            lanes,
            np.int32(min(n_steps, MOST_STEPS)),
            np.int32(min(n_pages, self._table_size)),
            n_top=n_top,
        )
        tokens, logprobs = (np.asarray(one).T.tolist() for one in (chosen.tokens, chosen.logprobs))
        top = (np.asarray(chosen.top_tokens), np.asarray(chosen.top_logprobs)) if n_top else None
        for place, lane in list(group.used):
            if self._take(lane, place, tokens[place], logprobs[place], top):
                group.lanes[place] = None
                self._pages.give_back(lane.pages)

    def _take(
        self,
        lane: Lane,
        place: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top: tuple[np.ndarray, np.ndarray] | None,
    ) -> bool:
        """Take what a lane has chosen; whether it is done."""
        params = lane.request.ask.params
        for step, token in enumerate(tokens):
            if token < 0:
                return False
            lane.tokens.append(token)
            lane.logprobs.append(logprobs[step])
            if lane.request.ask.n_top_sampled and top is not None:
                lane.top.append((top[0][step, place], top[1][step, place]))
            lane.position, lane.last = lane.position + 1, token
            is_stopped = token in params.stop_tokens or (
                bool(params.stop_strings) and self._ends_with(lane.tokens, params.stop_strings)
            )
            if is_stopped or len(lane.tokens) == params.max_tokens or lane.request.is_cancelled:
                lane.request.end(lane.number, lane.sample(is_stopped=is_stopped))
                return True
        return False

    def _table(self, pages: Sequence[int]) -> np.ndarray:
        table = np.zeros(self._table_size, np.int32)
        table[: len(pages)] = pages
        return table
