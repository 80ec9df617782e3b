"""Which sequences take part in the next step, and with which of their tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from skyrl_train.inference_engines.hf.kv_memory import UNIT, Copy
from skyrl_train.inference_engines.hf.region_table import Refusal, Region, RegionTable, prefix_keys
from skyrl_train.inference_engines.sequence import ActiveSequence


@dataclass(slots=True, eq=False)
class CachedSequence(ActiveSequence):
    """A sequence and what is stored of it."""

    region: Region | None = None  # None while it waits
    _keys: list[int] = field(default_factory=list)

    @property
    def n_cached(self) -> int:
        """Tokens whose keys and values are stored."""
        return 0 if self.region is None else self.region.n_cached

    def prefix_keys(self) -> list[int]:
        """Those of the tokens it waits with."""
        if not self._keys:
            self._keys = prefix_keys(self.token_ids)
        return self._keys


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence in a step, which reads its next `n_new` tokens."""

    sequence: CachedSequence
    n_new: int

    @property
    def start(self) -> int:
        """Where its region begins."""
        assert self.sequence.region is not None
        return self.sequence.region.start

    @property
    def is_complete(self) -> bool:
        """Whether it then has read all it has, so that its next token can be sampled."""
        return self.sequence.n_cached + self.n_new == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: what to copy before it, and what is read in it."""

    copies: list[Copy]
    rows: list[Row]  # in the order of their regions


class Scheduler:
    """First come, first served. Sequences join and leave between steps.

    Every running sequence reads one token a step; what is left of `max_tokens` goes to prompts, in chunks. When memory
    runs out, the sequence that came last waits again and is read anew: randomness belongs to positions, so that it
    samples the same tokens.
    """

    def __init__(self, table: RegionTable, max_sequences: int, max_tokens: int) -> None:
        self._table = table
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self.waiting: deque[CachedSequence] = deque()
        self.running: list[CachedSequence] = []

    def take_finished(self) -> list[CachedSequence]:
        """Sequences that are over, no longer held; what they stored stays for their session."""
        over = [sequence for sequence in self.running if sequence.is_over]
        if over:
            self.running = [sequence for sequence in self.running if not sequence.is_over]
        for sequence in over:
            if sequence.region is not None:
                self._table.give_back(sequence.region)
        if any(sequence.is_over for sequence in self.waiting):
            over += [sequence for sequence in self.waiting if sequence.is_over]
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.is_over)
        return over

    def next_step(self) -> Step:
        """The next forward pass. There is something to do when a sequence is waiting or running."""
        for sequence in list(self.running):  # in the order in which they came
            if sequence.region is not None:
                self._make_room(sequence)
        self._admit()
        return Step(self._table.take_copies(), self._rows())

    def restart_all(self) -> None:
        """Everything stored is worthless: every sequence is read again."""
        for sequence in reversed(self.running):
            sequence.region = None
            self.waiting.appendleft(sequence)
        self.running = []
        self._table.clear()

    def _make_room(self, sequence: CachedSequence) -> None:
        """Room for the tokens a sequence has, at the cost of those that came after it."""
        assert sequence.region is not None
        while not self._table.grow(sequence.region, len(sequence.token_ids), sequence.max_tokens):
            last = self.running.pop()
            assert last.region is not None
            self._table.free(last.region)
            last.region = None
            self.waiting.appendleft(last)
            if last is sequence:
                return

    def _admit(self) -> None:
        """Give waiting sequences a region, while there are sequences and memory to spare."""
        skipped: list[CachedSequence] = []
        while self.waiting and len(self.running) < self._max_sequences:
            sequence = self.waiting.popleft()
            placed = self._place(sequence)
            if placed is Refusal.FULL and not self.running:
                self._table.clear()  # what idles is in the way
                placed = self._place(sequence)
                assert placed is None, "whether it fits alone was checked when the request came in"
            if placed is None:
                self.running.append(sequence)
                continue
            skipped.append(sequence)
            if placed is Refusal.FULL:
                break
        self.waiting.extendleft(reversed(skipped))

    def _place(self, sequence: CachedSequence) -> Refusal | None:
        """Give a sequence its region, or say why not."""
        n_reserved = min(len(sequence.token_ids) + UNIT, sequence.max_tokens)
        session_id = sequence.request.session_id
        placed = self._table.place(
            sequence.token_ids, sequence.prefix_keys, n_reserved, sequence.max_tokens, session_id
        )
        if isinstance(placed, Refusal):
            return placed
        sequence.region, sequence._keys = placed, []
        if sequence.n_reused is None:
            sequence.n_reused = placed.n_cached
        return None

    def _rows(self) -> list[Row]:
        """Every sequence that has one token left to read, and prompts up to the token budget."""
        rows: list[Row] = []
        prompts: list[Row] = []
        for sequence in self.running:
            n_left = len(sequence.token_ids) - sequence.n_cached
            (rows if n_left == 1 else prompts).append(Row(sequence, n_left))
        budget = max(self._max_tokens - len(rows), UNIT)
        for row in prompts:
            rows.append(Row(row.sequence, min(row.n_new, budget)))
            budget -= row.n_new
            if budget <= 0:
                break
        return sorted(rows, key=lambda row: row.start)
