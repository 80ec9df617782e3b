"""Who owns which slot: running sequences, and sessions that wait for their next turn."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Session:
    """A slot that outlives its request: the next turn of the session finds `token_ids` cached."""

    slot: int
    token_ids: list[int]


class SlotTable:
    """Hands out slots of one common length, as many as `max_bytes` of keys and values allow."""

    def __init__(self, max_bytes: int, bytes_per_token: int) -> None:
        self.max_bytes = max_bytes
        self.bytes_per_token = bytes_per_token
        self.n_slots = 0  # handed out so far
        self._free: list[int] = []
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # idle ones, least recently used first

    def fits(self, n_slots: int, length: int) -> bool:
        """Whether that many slots of `length` tokens stay within the bound."""
        return n_slots * length * self.bytes_per_token <= self.max_bytes

    def take(self, session_id: str | None, token_ids: list[int], length: int) -> tuple[int, int] | None:
        """A slot of `length` tokens and how many of `token_ids` it already holds; None when there is no room.

        The slot of the session, a free one, a new one, or that of the session idle for longest.
        """
        if not self.fits(max(self.n_slots, 1), length):
            return None
        if session_id is not None and session_id in self._sessions:
            session = self._sessions.pop(session_id)
            return session.slot, _common_prefix(session.token_ids, token_ids)
        if self._free:
            return self._free.pop(), 0
        if self.fits(self.n_slots + 1, length):
            self.n_slots += 1
            return self.n_slots - 1, 0
        if self._sessions:
            return self._sessions.popitem(last=False)[1].slot, 0
        return None

    def give_back(self, slot: int, session_id: str | None, cached_ids: list[int]) -> None:
        """A sequence is over: its slot, which holds `cached_ids`, stays with its session if it has one."""
        if session_id is not None and session_id not in self._sessions:
            self._sessions[session_id] = _Session(slot, cached_ids)
        else:
            self._free.append(slot)

    def end_session(self, session_id: str) -> None:
        """Free the slot of an idle session, if there is one."""
        if session := self._sessions.pop(session_id, None):
            self._free.append(session.slot)

    def clear(self) -> None:
        """Forget every slot."""
        self._sessions.clear()
        self._free.clear()
        self.n_slots = 0


def _common_prefix(cached: list[int], token_ids: list[int]) -> int:
    """How many cached tokens the sequence can use; at least its last token is left to read."""
    n = min(len(cached), len(token_ids) - 1)
    if cached[:n] == token_ids[:n]:
        return n
    return next(i for i in range(n) if cached[i] != token_ids[i])
