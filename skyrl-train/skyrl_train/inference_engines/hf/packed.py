"""The packed embedded engine: one row of tokens of all sequences, and attention that reads one memory.

A step reads one token of every running sequence, and as many prompt tokens as the budget allows (`scheduler`). A prompt
prefix that the session or any other sequence has already stored is not read again (`region_table`).

Only the forward pass and weight copies run in the thread. Regions and sessions belong to the event loop.
"""

import torch

from skyrl_train.inference_engines.hf.attention import hidden_states
from skyrl_train.inference_engines.hf.embedded import EmbeddedEngine
from skyrl_train.inference_engines.hf.kv_memory import UNIT, Copy, KVMemory
from skyrl_train.inference_engines.hf.region_table import RegionTable
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, Row, Scheduler
from skyrl_train.inference_engines.hf.support import check_supported
from skyrl_train.inference_engines.sampling import SampledToken
from skyrl_train.models.loading import autocast
from skyrl_train.models.memory import cache_bytes_per_token
from skyrl_train.models.routing import Routers


class PackedEngine(EmbeddedEngine[CachedSequence]):
    """An engine that packs the new tokens of all sequences into one row, with one pool for keys and values."""

    _queue: Scheduler
    sequence_type = CachedSequence
    unit = UNIT

    def _probe(self) -> tuple[int, int]:
        check_supported(self._model, self._bf16)
        n_bytes = cache_bytes_per_token(self._model, bf16=self._bf16)
        if self._records_experts:
            routers = Routers.of(self._model)
            with torch.inference_mode(), autocast(self._model.device, self._bf16), routers.recording(lambda *_: None):
                self._model.base_model(input_ids=torch.tensor([[2]], device=self._model.device), use_cache=False)
            n_bytes += 2 * routers.n_layers * routers.n_chosen  # int16
        return 0, n_bytes

    def _create_cache(self, n_tokens: int) -> None:
        expert_shape = None
        if self._records_experts:
            routers = Routers.of(self._model)
            expert_shape = (routers.n_layers, routers.n_chosen)
        self._memory = KVMemory(n_tokens, expert_shape)
        self._table = RegionTable(n_tokens)
        self._queue = Scheduler(self._table, self._step_limits)

    def _reduce(self, n_sequences: int) -> str | None:
        """Halve the cache if allocating it failed and half holds the longest sequence. Otherwise, halve the step."""
        n_tokens = self._memory.size // 2 // self.unit * self.unit
        if not self._memory.does_not_fit or n_tokens < self.info.longest_sequence:
            return super()._reduce(n_sequences)
        waiting = self._queue.waiting
        self._create_cache(n_tokens)
        self._queue.waiting.extend(waiting)
        return f"a key-value cache of {n_tokens:,} tokens"

    async def end_session(self, session_id: str) -> None:
        self._table.end_session(session_id)

    async def _step(self) -> None:
        copies, rows = self._queue.next_step()
        self._n_step_tokens = sum(row.n_new for row in rows)
        choices = iter(await self._thread.run(self._forward, copies, rows))
        for row in rows:
            is_complete = row.is_complete
            row.region.n_cached += row.n_new
            if is_complete:
                self._append(row.sequence, next(choices))

    def _take_finished(self) -> list[CachedSequence]:
        finished = super()._take_finished()
        for sequence in finished if self._records_experts else ():
            if (region := sequence.region) is not None and region.n_cached:
                # The region is idle or freed, but not overwritten before the next step.
                experts = self._memory.expert_pool()[region.start : region.start + region.n_cached]
                sequence.experts = experts.to("cpu", copy=True).numpy()
        return finished

    def _drop_caches(self) -> None:
        super()._drop_caches()
        self._memory.release()

    @torch.inference_mode()
    def _forward(self, copies: list[Copy], rows: list[Row]) -> list[SampledToken]:
        """Run one forward pass, and return the next tokens of the complete rows, in order."""
        self._memory.copy(copies)
        device = self._model.device
        is_complete = torch.tensor([row.is_complete for row in rows], device=device)
        with autocast(device, self._bf16):
            states = hidden_states(self._model, self._memory, rows, last_only=True)[is_complete]  # (b, H)
            draws = [row.sequence.draw for row in rows if row.is_complete]
            return self._choose_tokens(states, draws)
