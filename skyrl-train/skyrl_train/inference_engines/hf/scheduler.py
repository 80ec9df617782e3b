"""Choose the sequences and tokens that the next step reads."""

from dataclasses import dataclass, field

from skyrl_train.inference_engines.hf.embedded import DrawnSequence, StepLimits
from skyrl_train.inference_engines.hf.kv_memory import UNIT, Copy
from skyrl_train.inference_engines.hf.region_table import Deferral, Region, RegionTable, prefix_keys
from skyrl_train.inference_engines.sequence import SequenceQueue


@dataclass(slots=True, eq=False)
class CachedSequence(DrawnSequence):
    """A sequence with the region that stores its keys and values."""

    region: Region | None = None  # None while the sequence waits
    position_offset: int = 0  # position of the next token, minus their number. Images of M-RoPE make it negative
    _keys: list[int] = field(default_factory=list)
    _prompt_keys: list[int] | None = None

    @property
    def n_cached(self) -> int:
        """Number of tokens whose keys and values are stored."""
        return 0 if self.region is None else self.region.n_cached

    def prefix_keys(self) -> list[int]:
        """Return the prefix keys of a waiting sequence's tokens, cached."""
        if not self._keys:
            self._keys = prefix_keys(self.token_ids)
        return self._keys

    def prompt_keys(self) -> list[int]:
        """Return hashes of the first 64, 128, … tokens of the prompt, kept while the sequence runs."""
        if self._prompt_keys is None:
            self._prompt_keys = prefix_keys(self.request.prompt_ids)[: self.n_prompt // UNIT]
        return self._prompt_keys


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a step that reads the next `n_new` of its tokens."""

    sequence: CachedSequence
    n_new: int
    n_skipped: int = 0  # tokens before the new ones whose keys the same pass stores

    @property
    def n_before(self) -> int:
        """Number of tokens before the new ones."""
        return self.sequence.n_cached + self.n_skipped

    @property
    def region(self) -> Region:
        """Region of the sequence."""
        assert self.sequence.region is not None
        return self.sequence.region

    @property
    def start(self) -> int:
        """Start of the region."""
        return self.region.start

    @property
    def is_complete(self) -> bool:
        """True if the step reads the sequence's last token, so that the next token can be sampled."""
        return self.n_before + self.n_new == len(self.sequence.token_ids)


class Scheduler(SequenceQueue[CachedSequence]):
    """A first-come, first-served scheduler. Sequences join and leave between steps.

    Every decoding sequence reads one token per step. Prompts share the rest of `limits.n_tokens`, in chunks, so a long
    prompt does not stall decoding. With n_tokens=512, three decoding sequences, and two new prompts A and B of 400
    tokens:

        step 1   3 decode, A reads 400, B reads 109    512 tokens, and A samples its first token
        step 2   4 decode, B reads 291                 295 tokens, and B samples its first token
        step 3   5 decode

    When memory runs out, the newest running sequence is preempted: it loses its region, returns to the front of the
    queue, and is prefilled again later. It still samples the same tokens, because a token's random number depends only
    on the request's seed and the position. The oldest sequence is never preempted for a newer one, so it always
    finishes, and the engine makes progress.
    """

    def __init__(self, table: RegionTable, limits: StepLimits) -> None:
        super().__init__()
        self._table = table
        self._limits = limits

    def take_finished(self) -> list[CachedSequence]:
        """Remove and return the sequences that are over. Their regions stay available to their sessions."""
        over = super().take_finished()
        for sequence in over:
            if sequence.region is not None:
                self._table.give_back(sequence.region)
        return over

    def next_step(self) -> tuple[list[Copy], list[Row]]:
        """Return the copies before the next forward pass, and its rows in memory order. Needs an active sequence."""
        for sequence in list(self.running):  # in arrival order
            while sequence.region is not None and not self._table.grow(
                sequence.region, len(sequence.token_ids), sequence.max_tokens
            ):
                last = self.running.pop()  # possibly `sequence` itself
                assert last.region is not None
                self._table.free(last.region)
                last.region = None
                self.waiting.appendleft(last)
        self._admit()
        rows: list[Row] = []
        prompts: list[Row] = []
        for sequence in self.running:
            n_left = len(sequence.token_ids) - sequence.n_cached
            (rows if n_left == 1 else prompts).append(Row(sequence, n_left))
        budget = max(self._limits.n_tokens - len(rows), UNIT)
        for row in prompts:
            rows.append(Row(row.sequence, min(row.n_new, budget)))
            budget -= row.n_new
            if budget <= 0:
                break
        return self._table.take_copies(), sorted(rows, key=lambda row: row.start)

    def restart_all(self) -> None:
        """Drop all regions. Every sequence waits and is read again."""
        for sequence in self.running:
            sequence.region = None
        super().restart_all()
        self._table.clear()

    def _admit(self) -> None:
        """Allocate regions for waiting sequences, up to the limits on sequences and memory.

        If a sequence does not fit, all later ones wait too: first come, first served. A sequence that can share a
        prefix after the next step is skipped, and later ones are tried.
        """
        skipped: list[CachedSequence] = []
        while self.waiting and len(self.running) < self._limits.n_sequences:
            sequence = self.waiting.popleft()
            placed = self._place(sequence)
            if placed is Deferral.FULL and not self.running:
                self._table.clear()  # idle regions fragment the memory
                placed = self._place(sequence)
                assert placed is None, "the engine checked on arrival that it fits alone"
            if placed is None:
                self.running.append(sequence)
                continue
            skipped.append(sequence)
            if placed is Deferral.FULL:
                break
        self.waiting.extendleft(reversed(skipped))

    def _place(self, sequence: CachedSequence) -> Deferral | None:
        """Give a sequence its region, or return the reason why not."""
        n_reserved = min(len(sequence.token_ids) + UNIT, sequence.max_tokens)
        session_id = sequence.request.session_id
        placed = self._table.place(
            sequence.token_ids, sequence.prefix_keys, n_reserved, sequence.max_tokens, session_id
        )
        if isinstance(placed, Deferral):
            return placed
        sequence.region, sequence._keys = placed, []
        if sequence.n_reused is None:
            sequence.n_reused = placed.n_cached
        return None
