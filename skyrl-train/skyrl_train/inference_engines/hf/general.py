"""The general embedded engine: padded batches with the model's own cache.

A step either reads the prompts of new sequences or one token of every running sequence. Samples of one prompt that
start in the same step read it once, and then each gets a copy of its cache. New sequences join the batch of the running
ones (`padded_cache`). If a model's hidden states change with padding, only sequences of equal length share a batch, and
the batches take turns.
"""

import logging
from collections import deque
from dataclasses import dataclass

import torch

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.hf.embedded import DrawnSequence, EmbeddedEngine
from skyrl_train.inference_engines.hf.padded_cache import PaddedCache
from skyrl_train.inference_engines.hf.support import check_cache
from skyrl_train.inference_engines.sampling import SampledToken
from skyrl_train.models.loading import autocast

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Batch:
    """Running sequences, and the cache that has each as a row."""

    cache: PaddedCache
    sequences: list[DrawnSequence]


class GeneralEngine(EmbeddedEngine[DrawnSequence]):
    """An engine for any causal model. It uses the model's own cache.

    It keeps no cache after a sequence ends, so every turn of a session reads its whole prompt, in a single step.
    """

    sequence_type = DrawnSequence

    def _probe(self) -> tuple[int, int]:
        assert not self._records_experts, "only the packed engine records experts"
        self._is_padded = True
        try:
            check_cache(self._model, self._bf16, is_padded=True)
        except EngineError as error:
            check_cache(self._model, self._bf16, is_padded=False)
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
        self._batches: deque[Batch] = deque()  # of the running sequences, changed only in the thread or between steps

    async def end_session(self, session_id: str) -> None:
        """Do nothing, because sessions keep no cache."""

    def _take_finished(self) -> list[DrawnSequence]:
        over = super()._take_finished()
        if not self._queue.running:
            self._batches.clear()  # or it would keep its memory until the next request
        return over

    async def _step(self) -> None:
        """Read the prompts of new sequences, or else one token of each sequence of the next batch."""
        if new := self._take_new():
            choices = await self._thread.run(self._prefill, new)
        else:
            new, choices = await self._thread.run(self._decode)
        for sequence, choice in zip(new, choices, strict=True):
            self._append(sequence, choice)

    def _take_new(self) -> list[DrawnSequence]:
        """Return the waiting sequences to read in this step, first come, first served, and remove them from the queue.

        Each sequence gets room for its maximum length, so none is preempted. All rows count as long as the longest may
        become.
        """
        waiting, running = self._queue.waiting, self._queue.running
        longest = max((sequence.max_tokens for sequence in running), default=0)
        new: list[DrawnSequence] = []
        prompts: set[tuple[int, ...]] = set()
        while waiting and len(running) + len(new) < self._max_num_seqs:
            sequence = waiting[0]
            longest = max(longest, sequence.max_tokens)
            prompts.add(tuple(sequence.token_ids))
            n_read = len(prompts) * max(map(len, prompts))
            if self._n_bytes(len(running) + len(new) + 1, longest) > self._max_cache_bytes:
                break
            if new and n_read > self._max_num_batched_tokens:
                break
            if new and not self._is_padded and len(sequence.token_ids) != len(new[0].token_ids):
                break
            new.append(waiting.popleft())
        running += new
        return new

    def _restart_all(self) -> None:
        super()._restart_all()
        self._batches.clear()

    @torch.inference_mode()
    def _prefill(self, sequences: list[DrawnSequence]) -> list[SampledToken]:
        """Read all tokens of new sequences, add the sequences to a batch, and return their next tokens."""
        self._remove_finished()  # before the new caches need memory
        rows = {tokens: i for i, tokens in enumerate(dict.fromkeys(tuple(s.token_ids) for s in sequences))}
        cache = PaddedCache(self._model)
        with autocast(self._model.device, self._bf16):
            states = cache.read(list(rows))
            copies = [rows[tuple(sequence.token_ids)] for sequence in sequences]
            choices = self._choose_tokens(states[copies], [sequence.draw for sequence in sequences])
        cache.select(copies)
        for batch in self._batches:
            if self._is_padded or batch.cache.length == cache.length:
                batch.cache.join(cache)
                batch.sequences += sequences
                return choices
        self._batches.append(Batch(cache, sequences))
        return choices

    def _remove_finished(self) -> None:
        for batch in self._batches:
            kept = [row for row, sequence in enumerate(batch.sequences) if not sequence.is_over]
            if 0 < len(kept) < len(batch.sequences):
                batch.cache.select(kept)
            batch.sequences = [batch.sequences[row] for row in kept]
        self._batches = deque(batch for batch in self._batches if batch.sequences)

    @torch.inference_mode()
    def _decode(self) -> tuple[list[DrawnSequence], list[SampledToken]]:
        """Read the last token of each sequence of the next batch, and return the sequences with their next tokens."""
        self._remove_finished()
        if not self._batches:
            return [], []
        batch = self._batches[0]
        self._batches.rotate(-1)
        with autocast(self._model.device, self._bf16):
            states = batch.cache.read([sequence.token_ids[-1:] for sequence in batch.sequences])
            choices = self._choose_tokens(states, [sequence.draw for sequence in batch.sequences])
        return list(batch.sequences), choices
