from itertools import pairwise

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyrl_train.inference_engines.hf.kv_memory import UNIT, Extents
from skyrl_train.inference_engines.hf.region_table import (
    Deferral,
    Region,
    RegionTable,
    capacity_for,
    common_prefix,
    prefix_keys,
)

SIZE = 12 * UNIT


def place(
    table: RegionTable, token_ids: list[int], n_reserved: int, max_tokens: int, session: str | None
) -> Region | Deferral:
    return table.place(token_ids, lambda: prefix_keys(token_ids), n_reserved, max_tokens, session)


class Regions(RuleBasedStateMachine):
    """Sequences that arrive, read, grow and finish, over a memory that holds their token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RegionTable(SIZE)
        self.memory = np.full(SIZE, -1)
        self.busy: list[Region] = []
        self.n_refused = 0

    def run_step(self) -> None:
        copies = self.table.take_copies()
        moved = [self.memory[c.source : c.source + c.n_tokens].copy() for c in copies]
        for copy, tokens in zip(copies, moved, strict=True):
            self.memory[copy.target : copy.target + copy.n_tokens] = tokens
        for region in self.busy:  # every sequence reads all its tokens
            end = len(region.token_ids)
            assert end <= region.capacity
            self.memory[region.start + region.n_cached : region.start + end] = region.token_ids[region.n_cached :]
            region.n_cached = end

    @rule(
        start=st.integers(1, 3),
        n_tokens=st.integers(1, 200),
        tail=st.integers(0, 2),
        session=st.sampled_from([None, "a", "b"]),
        n_at_once=st.integers(1, 3),
    )
    def arrive(self, start: int, n_tokens: int, tail: int, session: str | None, n_at_once: int) -> None:
        """Add sequences whose prompts share a prefix."""
        token_ids = [start] * n_tokens + [9] * tail
        for _ in range(n_at_once):
            region = place(self.table, list(token_ids), len(token_ids) + 5, len(token_ids) + 300, session)
            if region is Deferral.FULL and not self.busy:
                self.table.clear()  # evict idle regions as the scheduler does
                region = place(self.table, list(token_ids), len(token_ids) + 5, len(token_ids) + 300, session)
            if isinstance(region, Region):
                assert region.n_cached < len(token_ids)
                self.busy.append(region)
            else:
                assert region is Deferral.SOON or self.busy
        self.run_step()

    @precondition(lambda self: self.busy)
    @rule(index=st.integers(0, 99), n_tokens=st.integers(1, 90))
    def grow(self, index: int, n_tokens: int) -> None:
        """Extend a sequence, or drop it if there is no memory."""
        region = self.busy[index % len(self.busy)]
        region.token_ids += [7] * n_tokens
        if not self.table.grow(region, len(region.token_ids), 1000):
            self.table.free(region)
            self.busy.remove(region)
        self.run_step()

    @precondition(lambda self: self.busy)
    @rule(index=st.integers(0, 99))
    def finish(self, index: int) -> None:
        """Finish a sequence."""
        self.table.give_back(self.busy.pop(index % len(self.busy)))

    @rule(session=st.sampled_from(["a", "b", "c"]))
    def end_session(self, session: str) -> None:
        """End a session."""
        self.table.end_session(session)

    @precondition(lambda self: not self.busy)
    @rule()
    def clear(self) -> None:
        """Clear the table as for new weights."""
        self.table.clear()

    @invariant()
    def regions_do_not_overlap(self) -> None:
        """Busy regions, idle regions and free extents fill the memory exactly."""
        extents = self.table._extents
        parts = [(r.start, r.capacity) for r in (*self.busy, *self.table._idle)]
        parts += list(zip(extents._starts, extents._sizes, strict=True))
        parts.sort()
        assert sum(size for _, size in parts) == SIZE
        assert all(start + size == following for (start, size), (following, _) in pairwise(parts))

    @invariant()
    def regions_store_their_own_tokens(self) -> None:
        """This includes idle regions, from which others may be copied."""
        for region in (*self.busy, *self.table._idle):
            stored = self.memory[region.start : region.start + region.n_cached]
            assert stored.tolist() == region.token_ids[: region.n_cached]

    @invariant()
    def indexes_contain_only_live_regions(self) -> None:
        """Freed regions are never found."""
        live = {*self.busy, *self.table._idle}
        indexed = {(key, region) for key, regions in self.table._by_prefix.items() for region in regions}
        assert {region for _, region in indexed} <= live
        assert indexed == {(key, region) for region in live for key in region.prefix_keys}
        assert self.table._busy == set(self.busy)
        assert not any(region.is_ended for region in self.table._idle)
        assert set(self.table._sessions.values()) <= set(self.table._idle)


TestRegions = Regions.TestCase


def place_region(table: RegionTable, token_ids: list[int], session: str | None = None) -> Region:
    region = place(table, token_ids, len(token_ids), len(token_ids) + 100, session)
    assert isinstance(region, Region)
    return region


def read(table: RegionTable, region: Region) -> None:
    table.take_copies()
    region.n_cached = len(region.token_ids)


def test_a_prompt_being_read_is_awaited_and_then_copied() -> None:
    table = RegionTable(SIZE)
    leader = place_region(table, [1] * 100)
    assert place(table, [1] * 100, 100, 200, None) is Deferral.SOON
    assert place(table, [1] * 80 + [2] * 20, 100, 200, None) is Deferral.SOON
    read(table, leader)
    same, similar = place_region(table, [1] * 100), place_region(table, [1] * 80 + [2] * 20)
    assert (same.n_cached, similar.n_cached) == (99, 80)
    assert {(copy.source, copy.n_tokens) for copy in table.take_copies()} == {(leader.start, 99), (leader.start, 80)}


def test_an_idle_region_is_continued_in_place_or_copied_for_a_branch() -> None:
    table = RegionTable(SIZE)
    first = place_region(table, [1] * 70)
    read(table, first)
    table.give_back(first)
    long = place_region(table, [1] * 70 + [2] * 30)
    assert long is first
    assert long.n_cached == 70
    assert not table.take_copies()
    read(table, long)
    table.give_back(long)
    branch = place_region(table, [1] * 70 + [3] * 10)
    assert (branch is long, branch.n_cached) == (False, 70)
    read(table, branch)
    assert place_region(table, [1] * 70 + [2] * 30 + [4]).n_cached == 100


def test_a_prompt_is_copied_from_a_region_that_is_not_itself_being_copied() -> None:
    """A longer match that is itself being copied would cause a wait."""
    table = RegionTable(SIZE)
    long = place_region(table, [1] * 64 + [2] * 64)
    read(table, long)
    short = place_region(table, [1] * 64 + [3] * 10)
    read(table, short)
    assert table.grow(long, 129, 256)
    branch = place_region(table, [1] * 64 + [4] * 5)
    assert {(copy.source, copy.n_tokens) for copy in table.take_copies()} == {(0, 128), (short.start, 64)}
    assert branch.n_cached == 64


def test_short_prefixes_are_not_matched() -> None:
    table = RegionTable(SIZE)
    read(table, place_region(table, [1] * 30))
    assert place_region(table, [1] * 20 + [2]).n_cached == 0


@pytest.mark.parametrize(
    ("n_tokens", "max_tokens", "n_units"),
    [(1, 1, 1), (64, 64, 1), (65, 999, 2), (129, 999, 4), (129, 190, 3), (300, 310, 5)],
)
def test_capacities_double_up_to_max_tokens(n_tokens: int, max_tokens: int, n_units: int) -> None:
    assert capacity_for(n_tokens, max_tokens) == n_units * UNIT


def test_extents_are_taken_first_fit_and_merge_with_their_neighbours() -> None:
    extents = Extents(100)
    assert [extents.allocate(size) for size in (30, 30, 30, 20)] == [0, 30, 60, None]
    extents.free(0, 30)
    extents.free(60, 30)
    assert extents.allocate(35) == 60
    extents.free(30, 30)
    assert extents.allocate(60) == 0


def test_an_extent_grows_into_free_space_after_it() -> None:
    extents = Extents(100)
    assert [extents.allocate(size) for size in (30, 30, 20)] == [0, 30, 60]
    assert not extents.extend(0, 30, 40)
    extents.free(30, 30)
    assert not extents.extend(0, 30, 61)
    assert extents.extend(0, 30, 40)
    assert extents.extend(0, 40, 60)
    assert not extents.extend(0, 60, 61)
    assert extents.extend(60, 20, 40)
    assert extents.allocate(1) is None


@pytest.mark.parametrize("n_neighbours", [0, 1])
def test_a_long_conversation_is_copied_about_once(n_neighbours: int) -> None:
    table, n_copied, n_tokens = RegionTable(1000 * UNIT), 0, 10
    for turn in range(200):
        regions = [
            place(table, [name] * n_tokens, n_tokens + 20, n_tokens + 20, str(name)) for name in range(1 + n_neighbours)
        ]
        n_copied += sum(copy.n_tokens for copy in table.take_copies())
        for region in regions:
            assert isinstance(region, Region)
            assert region.n_cached == max(0, n_tokens - 31) or turn == 0
            region.n_cached = n_tokens - 1
            table.give_back(region)
        n_tokens += 30
    assert n_copied <= 1.5 * (1 + n_neighbours) * n_tokens


def test_prefixes_of_prompts() -> None:
    token_ids = list(range(150))
    keys = prefix_keys(token_ids)  # of every block, and of the whole prompt
    assert len(keys) == 3
    assert prefix_keys(token_ids[:128]) == keys[:2]
    assert prefix_keys([*token_ids[:149], 0])[2] != keys[2]
    assert common_prefix([1, 2, 3], [1, 2, 3], 3) == 2
    assert common_prefix([1, 2, 3], [1, 2, 3, 4], 3) == 3
    assert common_prefix([1, 2, 3], [1, 5, 3, 4], 3) == 1
