"""The regions of the key-value memory: which sequence or session owns them, shared prompts, and eviction.

A region is in use while its sequence runs, and idle afterwards. Idle regions keep their tokens for two readers: the
next turn of their session continues them in place, and new sequences with the same prefix copy it. For example,
with G = 4 samples of a prompt of 200 tokens, the first sample reads the prompt in one step. The other three wait for
that step (`Deferral.SOON`), copy 199 tokens, and read only the last one, whose hidden state gives the first logits.

When space runs out, the least recently used idle regions are evicted.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from skyrl_train.inference_engines.hf.kv_memory import UNIT, Copy, Extents


@dataclass(slots=True, eq=False)
class Region:
    """Space for `capacity` tokens from `start`. It stores the first `n_cached` of `token_ids`."""

    start: int
    capacity: int
    token_ids: list[int]  # while in use, the growing list of its sequence
    session_id: str | None
    n_cached: int = 0
    prefix_keys: list[int] = field(default_factory=list)  # keys under which the region is indexed
    is_ended: bool = False  # True once its session has ended


KeysOf = Callable[[], Sequence[int]]


class Deferral(Enum):
    """Reason why a sequence gets no region yet."""

    FULL = auto()  # regions in use leave too little space
    SOON = auto()  # the next step reads or copies a prefix that the sequence can share afterwards


class RegionTable:
    """Allocator of regions in one memory. Idle regions keep their tokens until their space is needed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Free every region."""
        self._extents = Extents(self.size)
        self._idle: OrderedDict[Region, None] = OrderedDict()  # least recently used first
        self._sessions: dict[str, Region] = {}  # idle regions, by session
        self._busy: set[Region] = set()  # regions in use
        self._by_prefix: dict[int, dict[Region, None]] = {}  # regions by hashes of their prefixes
        self._copies: dict[Region, Copy] = {}  # pending copies, by target

    def place(
        self, token_ids: list[int], keys: KeysOf, n_reserved: int, n_max: int, session_id: str | None
    ) -> Region | Deferral:
        """Return a region for a sequence of `token_ids`, or the reason why it must wait.

        Reuse the session's idle region. Otherwise, reuse or copy the region with the longest common prefix.

        `keys` returns the `prefix_keys` of `token_ids`. At least `n_reserved` tokens fit into the region, and the
        sequence never has more than `n_max`.
        """
        capacity = capacity_for(n_reserved, n_max)
        if session_id is not None and (region := self._sessions.get(session_id)):
            return self._reuse(region, token_ids, capacity)
        source, n_common = self._longest_match(token_ids, keys())
        if source is not None:
            if source.n_cached < n_common or source in self._copies:
                return Deferral.SOON
            if source in self._idle and source.n_cached == n_common:
                return self._reuse(source, token_ids, capacity, session_id)
        start = self._allocate(capacity, keep=source)
        if start is None:
            return Deferral.FULL
        region = Region(start, capacity, token_ids, session_id, n_common)
        if source is not None:
            self._copies[region] = Copy(source.start, start, n_common)
        self._index(region, keys())
        self._busy.add(region)
        return region

    def grow(self, region: Region, n_tokens: int, n_max: int) -> bool:
        """Make room for `n_tokens`. Return False if there is no space."""
        return n_tokens <= region.capacity or self._widen(region, capacity_for(n_tokens, n_max), may_evict=True)

    def take_copies(self) -> list[Copy]:
        """Return and forget the pending copies. Make them all at once, before a region is read or written."""
        copies = list(self._copies.values())
        self._copies.clear()
        return copies

    def give_back(self, region: Region) -> None:
        """Make the region of an ended sequence idle, or free it if its session already has an idle region."""
        session_id = region.session_id
        if region.n_cached == 0 or region.is_ended or session_id in self._sessions:
            self.free(region)
            return
        self._busy.remove(region)
        region.token_ids = region.token_ids[: region.n_cached]
        self._idle[region] = None
        if session_id is not None:
            self._sessions[session_id] = region
        else:
            self._index(region, prefix_keys(region.token_ids))

    def end_session(self, session_id: str) -> None:
        """Free the regions of a session: the idle one now, regions in use when they are given back."""
        if region := self._sessions.get(session_id):
            self.free(region)
        for region in self._busy:
            if region.session_id == session_id:
                region.is_ended = True

    def free(self, region: Region) -> None:
        """Free a region and forget its tokens."""
        self._busy.discard(region)
        self._leave_idle(region)
        self._unindex(region)
        self._copies.pop(region, None)
        self._extents.free(region.start, region.capacity)

    def _reuse(
        self, region: Region, token_ids: list[int], capacity: int, session_id: str | None = None
    ) -> Region | Deferral:
        """Continue an idle region with a sequence that shares a prefix with it.

        A region that grows here will grow again, so it doubles while there is free space. Each token of a conversation
        is then copied about once.
        """
        n_common = common_prefix(region.token_ids, token_ids, region.n_cached)
        if capacity > region.capacity:
            doubled = capacity_for(capacity, self.size)
            if not (self._widen(region, doubled, may_evict=False) or self._widen(region, capacity, may_evict=True)):
                return Deferral.FULL
        self._leave_idle(region)
        if n_common < region.n_cached:
            self._unindex(region)
        region.token_ids, region.n_cached = token_ids, n_common
        region.session_id = session_id or region.session_id
        self._busy.add(region)
        return region

    def _widen(self, region: Region, capacity: int, *, may_evict: bool) -> bool:
        """Enlarge a region, in place or by moving it. Return False if there is no space."""
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
        """Return the start of free space. Evict the least recently used idle regions as needed, but not `keep`."""
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

    def _index(self, region: Region, keys: Sequence[int]) -> None:
        """Index the region under more of its prefixes, after the regions that already have them."""
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
        """Return the region with the longest indexed prefix of `token_ids`, and the length of the common prefix."""
        for key in reversed(keys):
            if (regions := self._by_prefix.get(key)) is not None:
                region = max(regions, key=lambda region: (region not in self._copies, region.n_cached))
                n_common = common_prefix(region.token_ids, token_ids, len(region.token_ids))
                return (region, n_common) if n_common else (None, 0)
        return None, 0


def capacity_for(n_tokens: int, n_max: int) -> int:
    """Return the size of a region for `n_tokens` that may grow to `n_max`. Sizes double, so regions rarely move.

    >>> [capacity_for(n, n_max=400) for n in (50, 65, 129, 300)]
    [64, 128, 256, 448]
    """
    units = -(-n_tokens // UNIT)
    doubled = 1 << (units - 1).bit_length()
    return UNIT * min(doubled, -(-max(n_max, n_tokens) // UNIT))


def prefix_keys(token_ids: Sequence[int]) -> list[int]:
    """Return hashes of the first 64, 128, … tokens, and of all tokens, shortest prefix first."""
    keys = [0]
    for start in range(0, len(token_ids), UNIT):
        keys.append(hash((keys[-1], *token_ids[start : start + UNIT])))
    return keys[1:]


def common_prefix(stored: Sequence[int], token_ids: Sequence[int], n_stored: int) -> int:
    """Return the length of the common prefix of `token_ids` and the first `n_stored` of `stored`.

    The last of `token_ids` never counts, because it must be read to sample the next token.

    >>> common_prefix([1, 2, 3, 4], [1, 2, 9], n_stored=4), common_prefix([1, 2, 3, 4], [1, 2, 3], n_stored=4)
    (2, 2)
    """
    n = min(n_stored, len(token_ids) - 1)
    if stored[:n] == token_ids[:n]:
        return n
    return next(i for i in range(n) if stored[i] != token_ids[i])
