"""The general embedded engine: padded batches with the model's own cache.

A step reads either the prompts of new sequences, or one token of every sequence in a batch. Samples of one prompt that
start in the same step read it once, and then each gets a copy of its cache. New sequences join the batch of the running
ones (`padded_cache`). If a model's hidden states change with padding, only sequences of equal length share a batch, and
the batches take turns.

After a turn, its session keeps a copy of the row, so that the next turn reads only the tokens that follow. A recurrent
state cannot be rewound: a prompt that does not start with all tokens that the row has read is read from its start.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skyrl_gym.stop_reasons import StopReason
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.hf.embedded import DrawnSequence, EmbeddedEngine
from skyrl_train.inference_engines.hf.padded_cache import PaddedCache
from skyrl_train.inference_engines.hf.support import check_cache
from skyrl_train.inference_engines.sampling import SampledToken
from skyrl_train.media.spans import ImageSpan, Spans
from skyrl_train.models.loading import autocast
from skyrl_train.models.vision import find_encoder, shift

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PaddedSequence(DrawnSequence):
    """A sequence that may start with the cache of its session's last turn."""

    kept: PaddedCache | None = None


@dataclass(slots=True)
class Batch:
    """Running sequences, and the cache that has each as a row."""

    cache: PaddedCache
    sequences: list[PaddedSequence]


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """The cache of a session's last turn, with one row that has read `token_ids` and `images`."""

    cache: PaddedCache
    token_ids: list[int]
    images: tuple[ImageSpan, ...]


Prompt = tuple[tuple[int, ...], tuple[ImageSpan, ...]]


def _prompt(sequence: PaddedSequence) -> Prompt:
    return tuple(sequence.token_ids), sequence.request.images


class GeneralEngine(EmbeddedEngine[PaddedSequence]):
    """An engine for any causal model. It uses the model's own cache."""

    sequence_type = PaddedSequence

    def _probe(self) -> tuple[int, int]:
        assert not self._records_experts, "only the packed engine records experts"
        self._is_padded = True
        try:
            self._keeps_turns = check_cache(self._model, self._bf16, is_padded=True)
        except EngineError as error:
            self._keeps_turns = check_cache(self._model, self._bf16, is_padded=False)
            logger.warning("Only sequences of equal length share a batch, which is slow, because %s", error)
            self._is_padded = False
        sizes = []  # bytes of the cache for 1 and 2 tokens
        for n_tokens in (1, 2):
            cache = PaddedCache(self._model)
            with torch.inference_mode(), autocast(self._model.device, self._bf16):
                cache.read([[2] * n_tokens])
            sizes.append(cache.n_bytes)
        return 2 * sizes[0] - sizes[1], sizes[1] - sizes[0]

    def _create_cache(self, n_tokens: int) -> None:
        # Both are changed only in the thread or between steps.
        self._batches: deque[Batch] = deque()  # of the running sequences
        self._turns: dict[str | None, KeptTurn] = {}  # by session, the oldest first

    async def end_session(self, session_id: str) -> None:
        self._turns.pop(session_id, None)

    def _take_finished(self) -> list[PaddedSequence]:
        over = super()._take_finished()
        if not self._queue.running:
            self._batches.clear()  # or it would keep its memory until the next request
        return over

    async def _step(self) -> None:
        """Read the prompts of new sequences, or else one token of each sequence of the next batch."""
        if new := self._take_new():
            self._n_step_tokens = sum(len(s.token_ids) - (s.kept.length if s.kept else 0) for s in new)
            choices = await self._thread.run(self._prefill, new)
        else:
            self._n_step_tokens = len(self._queue.running)
            new, choices = await self._thread.run(self._decode)
        for sequence, choice in zip(new, choices, strict=True):
            self._append(sequence, choice)
        if any(sequence.is_over for sequence in new):
            await self._thread.run(self._remove_finished)

    def _take_new(self) -> list[PaddedSequence]:
        """Return the waiting sequences to read in this step, first come, first served, and remove them from the queue.

        Each sequence gets room for its maximum length, so none is preempted. All rows count as long as the longest may
        become. Kept turns leave if a sequence needs their room, the oldest first.
        """
        waiting, running = self._queue.waiting, self._queue.running
        longest = max((sequence.max_tokens for sequence in running), default=0)
        new: list[PaddedSequence] = []
        prompts: set[Prompt] = set()
        n_continued = 0  # tokens to read after kept turns
        while waiting and len(running) + len(new) < self._step_limits.n_sequences:
            sequence = waiting[0]
            longest = max(longest, sequence.max_tokens)
            n_bytes = self._n_bytes(len(running) + len(new) + 1, longest)
            if n_bytes > self._max_cache_bytes:
                break
            turn = self._find_turn(sequence)
            is_read_anyway = turn is None and _prompt(sequence) in prompts
            if turn is None:
                prompts.add(_prompt(sequence))
            else:
                n_continued += len(sequence.token_ids) - len(turn.token_ids)
            n_read = n_continued + len(prompts) * max((len(tokens) for tokens, _ in prompts), default=0)
            if new and not is_read_anyway and n_read > self._step_limits.n_tokens:
                break
            if new and not self._is_padded and len(sequence.token_ids) != len(new[0].token_ids):
                break
            new.append(waiting.popleft())
            self._turns.pop(sequence.request.session_id, None)
            sequence.kept = None if turn is None else turn.cache
            if sequence.n_reused is None:
                sequence.n_reused = 0 if turn is None else len(turn.token_ids)
            while n_bytes + sum(other.cache.n_bytes for other in self._turns.values()) > self._max_cache_bytes:
                del self._turns[next(iter(self._turns))]
        running += new
        return new

    def _find_turn(self, sequence: PaddedSequence) -> KeptTurn | None:
        """Return the kept turn that a sequence continues, if any."""
        turn = self._turns.get(sequence.request.session_id)
        n_read = 0 if turn is None else len(turn.token_ids)
        if turn is None or n_read >= len(sequence.token_ids) or sequence.token_ids[:n_read] != turn.token_ids:
            return None
        return turn if sequence.request.images[: len(turn.images)] == turn.images else None

    def _restart_all(self) -> None:
        super()._restart_all()
        self._batches.clear()
        self._turns.clear()
        for sequence in self._queue:
            sequence.kept = None
        if (encoder := find_encoder(self._model)) is not None:
            encoder.forget()

    @torch.inference_mode()
    def _prefill(self, sequences: list[PaddedSequence]) -> list[SampledToken]:
        """Read the unread tokens of new sequences, add the sequences to a batch, and return their next tokens."""
        self._remove_finished()  # before the new caches need memory
        states: dict[PaddedSequence, torch.Tensor] = {}
        groups: dict[int | None, list[PaddedSequence]] = {}  # by the number of unread tokens, None without a kept turn
        for sequence in sequences:
            n_unread = None if sequence.kept is None else len(sequence.token_ids) - sequence.kept.length
            groups.setdefault(n_unread, []).append(sequence)
        for group in groups.values():
            if (cache := group[0].kept) is None:
                cache = PaddedCache(self._model)
                rows = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(_prompt, group)))}
                copies = [rows[_prompt(sequence)] for sequence in group]
                last = self._read(cache, [tokens for tokens, _ in rows], [images for _, images in rows])[copies]
                cache.select(copies)
            else:
                unread = [sequence.token_ids[sequence.kept.length :] for sequence in group if sequence.kept]
                images = [shift(s.request.images, s.kept.length) for s in group if s.kept]  # `join` changes lengths
                for sequence in group[1:]:
                    assert sequence.kept is not None
                    cache.join(sequence.kept)
                last = self._read(cache, unread, images)
            for sequence, state in zip(group, last, strict=True):
                states[sequence], sequence.kept = state, None
            for batch in self._batches:
                if self._is_padded or batch.cache.length == cache.length:
                    batch.cache.join(cache)
                    batch.sequences += group
                    break
            else:
                self._batches.append(Batch(cache, group))
        return self._sample(sequences, torch.stack([states[sequence] for sequence in sequences]))

    @torch.inference_mode()
    def _remove_finished(self) -> None:
        """Drop the rows of sequences that are over. If a turn has not been aborted, its session keeps a copy."""
        for batch in self._batches:
            kept = [row for row, sequence in enumerate(batch.sequences) if not sequence.is_over]
            if len(kept) == len(batch.sequences):
                continue
            for row, sequence in enumerate(batch.sequences):
                session, n_read = sequence.request.session_id, batch.cache.lengths[row]
                has_ended = sequence.stop_reason in (StopReason.STOP, StopReason.LENGTH)
                if self._keeps_turns and has_ended and session is not None and n_read < len(sequence.token_ids):
                    token_ids, images = sequence.token_ids[:n_read], sequence.request.images
                    self._turns[session] = KeptTurn(batch.cache.copy_row(row), token_ids, images)
            if kept:
                batch.cache.select(kept)
            batch.sequences = [batch.sequences[row] for row in kept]
        self._batches = deque(batch for batch in self._batches if batch.sequences)

    @torch.inference_mode()
    def _decode(self) -> tuple[list[PaddedSequence], list[SampledToken]]:
        """Read the last token of each sequence of the next batch, and return the sequences with their next tokens."""
        self._remove_finished()
        if not self._batches:
            return [], []
        batch = self._batches[0]
        self._batches.rotate(-1)
        states = self._read(batch.cache, [sequence.token_ids[-1:] for sequence in batch.sequences])
        return list(batch.sequences), self._sample(batch.sequences, states)

    def _read(self, cache: PaddedCache, rows: Sequence[Sequence[int]], images: Sequence[Spans] = ()) -> torch.Tensor:
        """Read tokens and images of all rows. A long text is read in pieces, if the model can continue from its state.

        Pieces could divide an image, whose tokens may attend to each other.
        """
        n_tokens = n_piece = max(map(len, rows))
        if self._keeps_turns and all(len(row) == n_tokens for row in rows) and not any(images):
            n_piece = max(1, self._step_limits.n_tokens // len(rows))
        with autocast(self._model.device, self._bf16):
            for start in range(0, n_tokens, n_piece):
                states = cache.read([row[start : start + n_piece] for row in rows], images)
        return states

    def _sample(self, sequences: Sequence[PaddedSequence], states: torch.Tensor) -> list[SampledToken]:
        with autocast(self._model.device, self._bf16):
            return self._choose_tokens(states, [sequence.draw for sequence in sequences])
