"""Who owns which region of the key-value memory, and what is stored where: sessions, shared prompts, eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from skyrl_train.inference_engines.hf.kv_memory import UNIT, Copy, Extents


@dataclass(slots=True, eq=False)
class Region:
    """Room for `capacity` tokens from `start` on. The first `n_cached` of `token_ids` are stored in it."""

    start: int
    capacity: int
    token_ids: list[int]  # the sequence's own list: it grows with it
    session_id: str | None
    n_cached: int = 0
    prefix_keys: list[int] = field(default_factory=list)
    is_ended: bool = False  # its session is


KeysOf = Callable[[], Sequence[int]]


class Refusal(Enum):
    """Why a sequence gets no region yet."""

    FULL = auto()  # every region is in use
    SOON = auto()  # what it can share is being read right now


class RegionTable:
    """Hands out regions of one memory. Idle regions keep what they hold until their room is needed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._extents = Extents(size)
        self._idle: OrderedDict[Region, None] = OrderedDict()  # least recently used first
        self._sessions: dict[str, Region] = {}  # idle ones
        self._busy: dict[str, dict[Region, None]] = {}  # by session
        self._by_prefix: dict[int, dict[Region, None]] = {}  # by the hash of a prefix of their tokens
        self._copies: dict[Region, Copy] = {}  # to be carried out before the regions are used

    def place(
        self, token_ids: list[int], keys: KeysOf, n_reserved: int, n_most: int, session_id: str | None
    ) -> Region | Refusal:
        """A region for a sequence that holds `token_ids`, with as many of them stored as any other region can give.

        `keys` makes the `prefix_keys` of `token_ids`; `n_reserved` tokens fit, and the sequence never has more than
        `n_most`.
        """
        placed = self._place(token_ids, keys, capacity_for(n_reserved, n_most), session_id)
        if isinstance(placed, Region) and placed.session_id is not None:
            self._busy.setdefault(placed.session_id, {})[placed] = None
        return placed

    def _place(self, token_ids: list[int], keys: KeysOf, capacity: int, session_id: str | None) -> Region | Refusal:
        if session_id is not None and (region := self._sessions.get(session_id)):
            return self._reuse(region, token_ids, capacity)
        source, n_common = self._longest_match(token_ids, keys())
        if source is not None:
            if source.n_cached < n_common or source in self._copies:
                return Refusal.SOON
            if source in self._idle and source.n_cached == n_common:
                return self._reuse(source, token_ids, capacity, session_id)
        start = self._allocate(capacity, keep=source)
        if start is None:
            return Refusal.FULL
        region = Region(start, capacity, token_ids, session_id, n_common)
        if source is not None:
            self._copies[region] = Copy(source.start, start, n_common)
        self._index(region, keys())
        return region

    def grow(self, region: Region, n_tokens: int, n_most: int) -> bool:
        """Make `n_tokens` fit; False if there is no room."""
        return n_tokens <= region.capacity or self._widen(region, capacity_for(n_tokens, n_most), may_evict=True)

    def take_copies(self) -> list[Copy]:
        """What must be copied, all at once, before a region is read or written."""
        copies = list(self._copies.values())
        self._copies.clear()
        return copies

    def give_back(self, region: Region) -> None:
        """Its sequence is over: the region idles, under the name of its session if that has no other."""
        session_id = region.session_id
        if region.n_cached == 0 or region.is_ended or session_id in self._sessions:
            self.free(region)
            return
        self._forget_busy(region)
        region.token_ids = region.token_ids[: region.n_cached]
        self._idle[region] = None
        if session_id is not None:
            self._sessions[session_id] = region
        else:
            self._index(region, prefix_keys(region.token_ids))

    def end_session(self, session_id: str) -> None:
        """Free the idle region of a session, if there is one; those in use are freed when they are given back."""
        if region := self._sessions.get(session_id):
            self.free(region)
        for region in self._busy.get(session_id, ()):
            region.is_ended = True

    def free(self, region: Region) -> None:
        """Forget what a region holds; its room is free."""
        self._forget_busy(region)
        self._leave_idle(region)
        self._unindex(region)
        self._copies.pop(region, None)
        self._extents.free(region.start, region.capacity)

    def clear(self) -> None:
        """Forget every region."""
        self._idle.clear()
        self._sessions.clear()
        self._busy.clear()
        self._by_prefix.clear()
        self._copies.clear()
        self._extents.clear()

    def _reuse(
        self, region: Region, token_ids: list[int], capacity: int, session_id: str | None = None
    ) -> Region | Refusal:
        """An idle region goes on with a sequence that begins with some of its tokens.

        One that went on once will again: while there is room to spare, it doubles, so that each token of a
        conversation is copied about once.
        """
        n_common = common_prefix(region.token_ids, token_ids, region.n_cached)
        if capacity > region.capacity:
            doubled = capacity_for(capacity, self.size)
            if not (self._widen(region, doubled, may_evict=False) or self._widen(region, capacity, may_evict=True)):
                return Refusal.FULL
        self._leave_idle(region)
        if n_common < region.n_cached:
            self._unindex(region)
        region.token_ids, region.n_cached = token_ids, n_common
        region.session_id = session_id or region.session_id
        return region

    def _widen(self, region: Region, capacity: int, *, may_evict: bool) -> bool:
        """Give a region more room, in place or elsewhere; False if there is none."""
        if self._extents.extend(region.start, region.capacity, capacity):
            region.capacity = capacity
            return True
        start = self._allocate(capacity, keep=region) if may_evict else self._extents.allocate(capacity)
        if start is None:
            return False
        self._copies[region] = Copy(region.start, start, region.n_cached)
        self._extents.free(region.start, region.capacity)
        region.start, region.capacity = start, capacity
        return True

    def _allocate(self, capacity: int, keep: Region | None) -> int | None:
        """Room, if need be that of regions idle for longest; `keep` stays."""
        while (start := self._extents.allocate(capacity)) is None:
            victim = next((region for region in self._idle if region is not keep), None)
            if victim is None:
                return None
            self.free(victim)
        return start

    def _leave_idle(self, region: Region) -> None:
        self._idle.pop(region, None)
        if region.session_id is not None and self._sessions.get(region.session_id) is region:
            del self._sessions[region.session_id]

    def _forget_busy(self, region: Region) -> None:
        if region.session_id is not None and (busy := self._busy.get(region.session_id)):
            busy.pop(region, None)
            if not busy:
                del self._busy[region.session_id]

    def _index(self, region: Region, keys: Sequence[int]) -> None:
        """Let others find the region by more of its prefixes, behind those that have them already."""
        for key in keys:
            regions = self._by_prefix.setdefault(key, {})
            if region not in regions:
                regions[region] = None
                region.prefix_keys.append(key)

    def _unindex(self, region: Region) -> None:
        for key in region.prefix_keys:
            regions = self._by_prefix[key]
            del regions[region]
            if not regions:
                del self._by_prefix[key]
        region.prefix_keys = []

    def _longest_match(self, token_ids: list[int], keys: Sequence[int]) -> tuple[Region | None, int]:
        """The region that shares the longest known prefix, and how many tokens that is."""
        for key in reversed(keys):
            if (regions := self._by_prefix.get(key)) is not None:
                region = max(regions, key=lambda region: (region not in self._copies, region.n_cached))
                n_common = common_prefix(region.token_ids, token_ids, len(region.token_ids))
                return (region, n_common) if n_common else (None, 0)
        return None, 0


def capacity_for(n_tokens: int, n_most: int) -> int:
    """The size of a region that holds `n_tokens` and may grow to `n_most`: it doubles, so that it moves rarely."""
    units = -(-n_tokens // UNIT)
    doubled = 1 << (units - 1).bit_length()
    return UNIT * min(doubled, -(-max(n_most, n_tokens) // UNIT))


def prefix_keys(token_ids: Sequence[int]) -> list[int]:
    """Hashes of the prefixes of 64, 128, … tokens, and of the whole, shortest first."""
    keys = [0]
    for start in range(0, len(token_ids), UNIT):
        keys.append(hash((keys[-1], *token_ids[start : start + UNIT])))
    return keys[1:]


def common_prefix(stored: Sequence[int], token_ids: Sequence[int], n_stored: int) -> int:
    """How many of `token_ids` the first `n_stored` stored ones begin with; the last one is never counted."""
    n = min(n_stored, len(token_ids) - 1)
    if stored[:n] == token_ids[:n]:
        return n
    return next(i for i in range(n) if stored[i] != token_ids[i])
