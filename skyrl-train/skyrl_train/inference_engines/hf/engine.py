"""The embedded engine: a Hugging Face model that may share the policy's tensors.

A step reads one token of every running sequence, and as many prompt tokens as the budget allows (`scheduler`). A prompt
prefix that the session or any other sequence has already stored is not read again (`region_table`).

Only the forward pass and weight copies run in the thread. Regions and sessions belong to the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineInfo, EngineRequest
from skyrl_train.inference_engines.hf.attention import hidden_states
from skyrl_train.inference_engines.hf.kv_memory import UNIT, KVMemory
from skyrl_train.inference_engines.hf.region_table import RegionTable
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, EngineStep, Scheduler
from skyrl_train.inference_engines.hf.support import check_supported
from skyrl_train.inference_engines.sampling import Draw, SampledToken, choose_tokens
from skyrl_train.inference_engines.sequence import all_eos_ids
from skyrl_train.inference_engines.setup import EngineSetup
from skyrl_train.inference_engines.stepped import EngineThread, MemoryPart, SteppedEngine
from skyrl_train.models.loading import autocast, default_device, load_model, load_tokenizer
from skyrl_train.models.logprobs import lm_head_logits, scaled_logits
from skyrl_train.models.lora import trained_parameters
from skyrl_train.models.memory import cache_bytes_per_token
from skyrl_train.models.offload import OffloadedTensors, release_cached_memory
from skyrl_train.weight_sync import Receipt, Receiver, SyncPlan

CHUNK_LOGITS = 1 << 24  # logits in memory at once: 64 MiB


def start(setup: EngineSetup) -> HFEngine:
    """Create a run's engine, with the policy `setup.model`. It owns the model if it has the process to itself."""
    generator = setup.cfg.generator
    assert setup.model is not None
    return HFEngine(
        setup.model,
        setup.tokenizer,
        max_num_seqs=generator.max_num_seqs,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        max_cache_bytes=setup.usable_bytes,
        bf16=setup.cfg.trainer.bf16,
        executor=setup.executor,
        owns_model=setup.executor is None,
    )


def load_engine(
    path: str,
    *,
    dtype: torch.dtype,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_cache_bytes: int,
    bf16: bool = False,
) -> HFEngine:
    """Return an engine with its own copy of the model in a Hugging Face folder, e.g. in another process.

    Raises:
        ConfigError: the model or its tokenizer cannot be loaded.
        EngineError: the embedded engine does not support the model.
    """
    return HFEngine(
        load_model(path, dtype=dtype, device=default_device()),
        load_tokenizer(path),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_cache_bytes=max_cache_bytes,
        bf16=bf16,
        owns_model=True,
    )


class HFEngine(SteppedEngine[CachedSequence]):
    """An engine that generates with the tensors of `model`, so if a trainer updates them, only the version changes."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_cache_bytes: int,
        bf16: bool = False,
        executor: ThreadPoolExecutor | None = None,
        owns_model: bool = False,
    ) -> None:
        """Run at most `max_num_seqs` sequences at once, with at most `max_cache_bytes` of keys and values.

        The model runs in the single thread of `executor`. By default, the engine starts a thread. With `owns_model`,
        the weights move to host memory while the engine sleeps.

        Raises:
            EngineError: the model does not support packed sequences.
        """
        thread = EngineThread(executor, "hf-engine")
        thread.run_blocking(check_supported, model, bf16)
        ids = model.generation_config.eos_token_id if model.generation_config is not None else None
        super().__init__(
            context_length=int(model.config.get_text_config().max_position_embeddings),
            vocab_size=int(model.config.get_text_config().vocab_size),
            eos_ids=all_eos_ids(ids, tokenizer.eos_token_id),
            tokenizer=tokenizer,
            thread=thread,
        )
        self._model = model
        self._bf16 = bf16
        self._head = Head(model)
        self._bytes_per_token = cache_bytes_per_token(model, bf16=bf16)
        self._max_cache_bytes = max_cache_bytes
        size = max_cache_bytes // self._bytes_per_token // UNIT * UNIT
        self._memory = KVMemory(size)
        self.info = EngineInfo(self.info.context_length, min(self.info.context_length, size))
        self._table = RegionTable(size)
        self._scheduler = Scheduler(self._table, max_num_seqs, max_num_batched_tokens)
        self._owns_model = owns_model
        self._offloaded: OffloadedTensors | None = None  # the weights, while the engine sleeps

    async def end_session(self, session_id: str) -> None:
        self._table.end_session(session_id)

    def _new_sequence(self, request: EngineRequest, max_tokens: int) -> CachedSequence:
        if -(-max_tokens // UNIT) * UNIT > self._memory.size:
            raise EngineError(
                f"a sequence of {max_tokens} tokens needs {max_tokens * self._bytes_per_token:,} bytes of key-value "
                f"cache but only {self._max_cache_bytes:,} are available; raise generator.gpu_memory_utilization or "
                "lower generator.max_input_length or sampling_params.max_generate_length"
            )
        sequence = CachedSequence(request, max_tokens)
        sequence.draw = Draw(request.sampling, request.seed, sequence.token_ids, sequence.n_prompt, self._eos_ids)
        return sequence

    def _add(self, sequences: Sequence[CachedSequence]) -> None:
        self._scheduler.waiting.extend(sequences)

    def _active_sequences(self) -> Iterable[CachedSequence]:
        return chain(self._scheduler.running, self._scheduler.waiting)

    def _take_finished(self) -> list[CachedSequence]:
        return self._scheduler.take_finished()

    async def _step(self) -> None:
        step = self._scheduler.next_step()
        choices = iter(await self._thread.run(self._forward, step))
        for row in step.rows:
            is_complete = row.is_complete
            row.region.n_cached += row.n_new
            if is_complete:
                self._append(row.sequence, next(choices))

    async def _drop_all(self) -> None:
        self._scheduler.running = []
        self._scheduler.waiting = deque()
        self._drop_caches()

    async def _load_weights(self, plan: SyncPlan) -> Receipt:
        self._scheduler.restart_all()  # before the transfer, because a failed one leaves some new weights
        return await self._thread.run(self._copy_weights, plan)

    @torch.no_grad()
    def _copy_weights(self, plan: SyncPlan) -> Receipt:
        """Copy weights into the model, except tensors that share the policy's memory."""
        parameters = trained_parameters(self._model) if plan.kind == "adapter" else dict(self._model.named_parameters())
        receiver = Receiver(plan, into=parameters)
        received = set()
        for name, tensor in receiver:
            if name not in parameters or parameters[name].shape != tensor.shape:
                shape = tuple(parameters[name].shape) if name in parameters else "none"
                raise EngineError(
                    f"the policy sends {name} of shape {tuple(tensor.shape)} but the engine's model has {shape}; "
                    "load the engine from the policy's folder"
                )
            received.add(name)
            if parameters[name].data_ptr() != tensor.data_ptr():
                parameters[name].copy_(tensor)
        if missing := sorted(parameters.keys() - received):
            raise EngineError(f"the policy has no {missing[0]} ({len(missing)} tensors in all) for the engine's model")
        return receiver.receipt

    async def _release_memory(self) -> None:
        self._drop_caches()
        if self._owns_model:
            await self._thread.run(self._offload)

    def _offload(self) -> None:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        self._offloaded = OffloadedTensors(tensors, self._model.device)
        release_cached_memory(self._model.device)

    async def _restore_memory(self, part: MemoryPart) -> None:
        if part == "weights" and self._offloaded is not None:
            await self._thread.run(self._offloaded.restore)
            self._offloaded = None

    async def _shut_down(self) -> None:
        self._drop_caches()

    def _drop_caches(self) -> None:
        """Drop all keys and values. Active sequences are prefilled again."""
        self._scheduler.restart_all()
        self._memory.release()
        self._head.release()

    @torch.inference_mode()
    def _forward(self, step: EngineStep) -> list[SampledToken]:
        """Run one forward pass, and return the next tokens of the complete rows, in order."""
        self._memory.copy(step.copies)
        device = self._model.device
        is_complete = torch.tensor([row.is_complete for row in step.rows], device=device)
        with autocast(device, self._bf16):
            states = hidden_states(self._model, self._memory, step.rows, last_only=True)[is_complete]  # (b, H)
            draws = [row.sequence.draw for row in step.rows if row.is_complete]
            n_rows = self._head.max_rows
            return [
                choice
                for i in range(0, len(draws), n_rows)
                for choice in choose_tokens(self._head.logits(states[i : i + n_rows]), draws[i : i + n_rows])
            ]


class Head:
    """A model's language-model head that reuses one block of memory for the logits of every step.

    With a vocabulary of 150,000, a step's logits take tens of megabytes, and on a CPU, allocating them takes as long
    as computing them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._n_tokens = model.get_output_embeddings().weight.shape[0]
        self._memory: torch.Tensor | None = None

    @property
    def max_rows(self) -> int:
        """Maximum number of rows to compute at once."""
        return max(1, CHUNK_LOGITS // self._n_tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits (b, V) of hidden states (b, H), valid until the next call. Callers may change them."""
        head = self._model.get_output_embeddings()
        is_plain = type(head) is torch.nn.Linear and head.bias is None and head.weight.dtype == torch.float32
        if not is_plain or hidden.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return lm_head_logits(self._model, hidden)
        if self._memory is None or len(self._memory) < len(hidden):
            self._memory = hidden.new_empty(len(hidden), self._n_tokens)
        out = self._memory[: len(hidden)]
        torch.mm(hidden, head.weight.t(), out=out)
        return scaled_logits(self._model, out)

    def release(self) -> None:
        """Release the memory."""
        self._memory = None
