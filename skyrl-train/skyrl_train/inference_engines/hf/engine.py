"""The embedded engine: an asyncio front, and one step loop over a Hugging Face model.

A step is one forward pass: the prompts that just arrived, or one token for every running sequence. Sequences join
and leave between steps. The key-value cache of a session stays, so that its next turn reads only its new tokens.

Only the forward pass runs in a thread; requests, slots and sessions belong to the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, EngineResult
from skyrl_train.inference_engines.hf.kv_memory import KVMemory, StepCache, rounded_length
from skyrl_train.inference_engines.hf.sampling import sample_tokens, uniforms
from skyrl_train.inference_engines.hf.slot_table import SlotTable
from skyrl_train.models.loading import autocast
from skyrl_train.models.logprobs import lm_head_logits

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 16384  # of one forward pass; a longer prompt gets a pass of its own


@dataclass(slots=True)
class _Call:
    """One `generate` call: its results as they come in, and the future that waits for the last."""

    results: list[EngineResult | None]
    n_left: int
    done: asyncio.Future[None]


@dataclass(slots=True)
class _Sequence:
    """A request that is being served."""

    request: EngineRequest
    call: _Call
    index: int  # of the request in its call
    max_new_tokens: int
    slot: int = -1
    n_cached: int = 0  # tokens whose keys and values are stored
    token_ids: list[int] = field(default_factory=list)  # prompt and response
    logprobs: list[float] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def max_tokens(self) -> int:
        return self.n_prompt + self.max_new_tokens

    @property
    def is_over(self) -> bool:
        """Complete, or nobody waits for it any more."""
        return self.stop_reason is not None or self.call.done.done()


class HFEngine:
    """Generates with the tensors of `model` itself: a weight update needs no copy, only a new version number."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_num_seqs: int,
        max_cache_bytes: int,
        bf16: bool = False,
    ) -> None:
        """`max_num_seqs` sequences run at once; their keys and values take at most `max_cache_bytes`."""
        self._model = model
        self._tokenizer = tokenizer
        self._max_num_seqs = max_num_seqs
        self._bf16 = bf16
        self.context_length = _context_length(model)
        self._eos_ids = _eos_ids(model, tokenizer)
        self._slots = KVMemory()
        self._table = SlotTable(max_cache_bytes, _cache_bytes_per_token(model))
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._weight_version = 0
        self._loop_task: asyncio.Task[None] | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-engine")

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        """See `InferenceEngine.generate`."""
        if not requests:
            return []
        call = _Call([None] * len(requests), len(requests), asyncio.get_running_loop().create_future())
        self._waiting.extend([self._sequence(request, call, index) for index, request in enumerate(requests)])
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run())
        await call.done
        return [result for result in call.results if result is not None]

    def end_session(self, session_id: str) -> None:
        """See `InferenceEngine.end_session`."""
        self._table.end_session(session_id)

    async def sync_weights(self, weight_version: int) -> None:
        """See `InferenceEngine.sync_weights`. The tensors are the policy's own: only caches are dropped."""
        n_unfinished = sum(not sequence.is_over for sequence in [*self._running, *self._waiting])
        if n_unfinished:
            raise EngineError(
                f"weights changed to version {weight_version} while {n_unfinished} sequences were being generated; "
                "wait for generate() to return before updating the policy"
            )
        if self._loop_task is not None and not self._loop_task.done():
            await asyncio.wait([self._loop_task])  # the last step of calls that were cancelled
        self._forget_slots()  # computed with other weights; while the policy trains, their memory is its to use
        self._weight_version = weight_version

    async def close(self) -> None:
        """See `InferenceEngine.close`."""
        if self._loop_task is not None and not self._loop_task.done():
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        self._executor.shutdown(wait=True)  # the step it is in still needs the slots
        self._fail(EngineError("the engine was closed while requests were waiting"))

    # -- the step loop

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unfinished():
            try:
                slot_length = self._admit()
                await loop.run_in_executor(self._executor, self._step, slot_length)
            except Exception as error:  # the boundary of a request: every caller learns why, and the engine goes on
                logger.exception("A generation step failed")
                self._fail(error if isinstance(error, EngineError) else EngineError(f"generation failed: {error!r}"))

    def _unfinished(self) -> bool:
        """Hand out what is complete, drop what nobody waits for any more; whether there is more to do."""
        over = [sequence for sequence in self._running if sequence.is_over]
        self._running = [sequence for sequence in self._running if not sequence.is_over]
        self._waiting = deque(sequence for sequence in self._waiting if not sequence.is_over)
        for sequence in over:
            cached_ids = sequence.token_ids[: sequence.n_cached]
            self._table.give_back(sequence.slot, sequence.request.session_id, cached_ids)
            if sequence.stop_reason is not None:
                self._deliver(sequence)
        return bool(self._running or self._waiting)

    @torch.inference_mode()
    def _step(self, slot_length: int) -> None:
        """One forward pass, and one sampled token for each sequence in it."""
        self._slots.reserve(self._table.n_slots, slot_length)
        batch = self._prompts_to_read() or self._running
        with autocast(self._model.device, self._bf16):
            logits = self._next_logits(batch)  # (b, V)
        positions = [len(sequence.token_ids) for sequence in batch]
        randomness = uniforms([sequence.request.seed for sequence in batch], positions)
        token_ids, logprobs = sample_tokens(
            logits,
            [sequence.request.sampling for sequence in batch],
            torch.from_numpy(randomness).to(logits.device),
        )
        for sequence, token_id, logprob in zip(batch, token_ids.tolist(), logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                raise EngineError(
                    f"the model's logits are not finite (weight version {self._weight_version}): the policy has "
                    "diverged; resume from an earlier checkpoint with a lower learning rate"
                )
            sequence.n_cached = len(sequence.token_ids)
            sequence.token_ids.append(token_id)
            sequence.logprobs.append(logprob)
            sequence.stop_reason = self._stop_reason(sequence)

    def _next_logits(self, batch: Sequence[_Sequence]) -> torch.Tensor:
        """Logits (b, V) after the last token of each sequence. A prompt that several share is read once."""
        leaders: dict[tuple[int, ...], int] = {}  # prompt -> row of `unique`
        unique: list[_Sequence] = []
        row_of = []
        for sequence in batch:
            is_new = sequence.n_cached == 0
            row = leaders.setdefault(tuple(sequence.token_ids), len(unique)) if is_new else len(unique)
            if row == len(unique):
                unique.append(sequence)
            row_of.append(row)
        logits = self._forward(unique)
        if len(unique) == len(batch):
            return logits
        copies = [(unique[row], s) for row, s in zip(row_of, batch, strict=True) if unique[row] is not s]
        n_tokens = max(len(sequence.token_ids) for _, sequence in copies)
        self._slots.copy([leader.slot for leader, _ in copies], [s.slot for _, s in copies], n_tokens)
        return logits[row_of]

    def _forward(self, batch: Sequence[_Sequence]) -> torch.Tensor:
        """Feed each sequence the tokens that are not cached yet; logits (b, V) after its last token."""
        device = self._model.device
        new_ids = [sequence.token_ids[sequence.n_cached :] for sequence in batch]
        n_new = torch.tensor([len(ids) for ids in new_ids])
        width = int(n_new.max())  # T
        input_ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in new_ids], device=device)  # (b, T)
        n_new = n_new.to(device)
        start = torch.tensor([sequence.n_cached for sequence in batch], device=device)
        positions = start[:, None] + torch.arange(width, device=device)  # (b, T)
        positions = positions.clamp(max=self.context_length - 1)  # of padding
        cache = StepCache(self._slots, [sequence.slot for sequence in batch], positions, n_new)
        mask = torch.arange(cache.length, device=device) <= positions[:, None, :, None]  # (b, 1, T, length)
        hidden = self._model.base_model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        last = hidden[torch.arange(len(batch), device=device), n_new - 1]  # (b, H)
        return lm_head_logits(self._model, last)

    def _prompts_to_read(self) -> list[_Sequence]:
        """Sequences with more than their last token to read, as many as one pass takes."""
        batch: list[_Sequence] = []
        width = 0
        for sequence in self._running:
            n_new = len(sequence.token_ids) - sequence.n_cached
            if n_new == 1 and sequence.n_cached:
                continue
            width = max(width, n_new)
            if batch and width * (len(batch) + 1) > PREFILL_TOKENS:
                break
            batch.append(sequence)
        return batch

    def _stop_reason(self, sequence: _Sequence) -> Literal["stop", "length"] | None:
        if sequence.token_ids[-1] in self._eos_ids:
            return "stop"
        stop_strings = sequence.request.sampling.stop
        if stop_strings:
            # A token is a byte or more. One that goes on after the end of a stop string ends the text all the same.
            n_tail = min(max(len(stop.encode()) for stop in stop_strings) + 1, len(sequence.logprobs))
            tail = self._tokenizer.decode(sequence.token_ids[-n_tail:])
            if any(stop in tail for stop in stop_strings):
                return "stop"
        return "length" if len(sequence.logprobs) >= sequence.max_new_tokens else None

    # -- requests and results

    def _sequence(self, request: EngineRequest, call: _Call, index: int) -> _Sequence:
        n_prompt = len(request.prompt_ids)
        room = self.context_length - n_prompt
        if n_prompt == 0 or room <= 0:
            raise EngineError(
                f"a prompt of {n_prompt} tokens does not fit the model's context of {self.context_length}; "
                "lower generator.max_input_length"
            )
        sequence = _Sequence(request, call, index, min(request.sampling.max_new_tokens, room))
        if not self._table.fits(1, rounded_length(sequence.max_tokens)):
            n_bytes = sequence.max_tokens * self._table.bytes_per_token
            raise EngineError(
                f"a sequence of {sequence.max_tokens} tokens needs {n_bytes:,} "
                f"bytes of key-value cache, {self._table.max_bytes:,} are allowed; raise "
                "generator.gpu_memory_utilization or lower generator.max_input_length or "
                "sampling_params.max_generate_length"
            )
        sequence.token_ids = list(request.prompt_ids)
        return sequence

    def _admit(self) -> int:
        """Give waiting sequences a slot, first come first served, while there are sequences and memory to spare.

        Returns the length that all slots must have for them.
        """
        length = self._slots.length
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            longer = max(length, rounded_length(sequence.max_tokens))
            taken = self._table.take(sequence.request.session_id, sequence.token_ids, longer)
            if taken is None:
                if self._running:
                    break
                self._forget_slots()  # a longer sequence than before may fit in fewer slots
                longer = rounded_length(sequence.max_tokens)
                taken = self._table.take(None, sequence.token_ids, longer)
                assert taken is not None, "whether it fits alone was checked when the request came in"
            sequence.slot, sequence.n_cached = taken
            length = longer
            self._running.append(self._waiting.popleft())
        return length

    def _deliver(self, sequence: _Sequence) -> None:
        """Hand the result to its caller."""
        assert sequence.stop_reason is not None
        sequence.call.results[sequence.index] = EngineResult(
            token_ids=sequence.token_ids[sequence.n_prompt :],
            logprobs=sequence.logprobs,
            stop_reason=sequence.stop_reason,
            weight_version=self._weight_version,
        )
        sequence.call.n_left -= 1
        if sequence.call.n_left == 0 and not sequence.call.done.done():
            sequence.call.done.set_result(None)

    def _fail(self, error: EngineError) -> None:
        """Tell everyone who waits, and start over with empty slots."""
        for sequence in [*self._running, *self._waiting]:
            if not sequence.call.done.done():
                sequence.call.done.set_exception(error)
        self._running = []
        self._waiting.clear()
        self._forget_slots()

    def _forget_slots(self) -> None:
        self._table.clear()
        self._slots.release()


def _cache_bytes_per_token(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    n_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * n_heads * head_dim * model.dtype.itemsize


def _context_length(model: PreTrainedModel) -> int:
    """Tokens the engine lets a sequence grow to. A sliding window is not modelled: it ends there."""
    config = model.config.get_text_config()
    length = int(config.max_position_embeddings)
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)  # None: all layers alike
    if window is not None and (layer_types is None or "sliding_attention" in layer_types):
        return min(length, int(window))
    return length


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    listed = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in [*listed, tokenizer.eos_token_id] if i is not None)
