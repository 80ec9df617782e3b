"""The embedded engine: a Hugging Face model, with the policy's own tensors.

A step reads one token of every running sequence, and as many tokens of new prompts as its budget has left. What a
session, or any other sequence, has stored of a prompt is not read again.

Only the forward pass runs in the thread; regions and sessions belong to the event loop.
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
from skyrl_train.inference_engines.hf.head import Head
from skyrl_train.inference_engines.hf.kv_memory import UNIT, KVMemory
from skyrl_train.inference_engines.hf.region_table import RegionTable
from skyrl_train.inference_engines.hf.scheduler import CachedSequence, Scheduler, Step
from skyrl_train.inference_engines.hf.support import check_supported
from skyrl_train.inference_engines.sampling import Choice, Draw, choose_tokens
from skyrl_train.inference_engines.sequence import Call
from skyrl_train.inference_engines.stepped import SteppedEngine
from skyrl_train.inference_engines.stopping import all_eos_ids
from skyrl_train.inference_engines.thread import EngineThread
from skyrl_train.models.loading import autocast
from skyrl_train.models.memory import cache_bytes_per_token
from skyrl_train.weight_sync import Receipt, SyncPlan, receiver


class HFEngine(SteppedEngine[CachedSequence]):
    """Generates with the tensors of `model` itself: a weight update needs no copy, only a new version number."""

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
    ) -> None:
        """`max_num_seqs` sequences run at once; their keys and values take at most `max_cache_bytes`.

        `executor`, if given, has one thread, in which the model runs; otherwise the engine has one of its own.

        Raises:
            EngineError: the model does not compute packed what it computes alone.
        """
        thread = EngineThread(executor, "hf-engine")
        thread.begin(check_supported, model, bf16)
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

    async def end_session(self, session_id: str) -> None:
        """See `InferenceEngine.end_session`."""
        self._table.end_session(session_id)

    def _sequence(self, request: EngineRequest, call: Call, index: int, max_tokens: int) -> CachedSequence:
        if -(-max_tokens // UNIT) * UNIT > self._memory.size:
            raise EngineError(
                f"a sequence of {max_tokens} tokens needs {max_tokens * self._bytes_per_token:,} bytes of key-value "
                f"cache and {self._max_cache_bytes:,} are allowed; raise generator.gpu_memory_utilization or lower "
                "generator.max_input_length or sampling_params.max_generate_length"
            )
        return CachedSequence(request, call, index, max_tokens, list(request.prompt_ids))

    def _add(self, sequences: Sequence[CachedSequence]) -> None:
        self._scheduler.waiting.extend(sequences)

    def _held(self) -> Iterable[CachedSequence]:
        return chain(self._scheduler.running, self._scheduler.waiting)

    def _take_finished(self) -> list[CachedSequence]:
        return self._scheduler.take_finished()

    async def _step(self) -> None:
        step = self._scheduler.next_step()
        choices = iter(await self._thread.run(self._forward, step))
        for row in step.rows:
            sequence, is_complete = row.sequence, row.is_complete
            assert sequence.region is not None
            sequence.region.n_cached += row.n_new
            if is_complete:
                self._append(sequence, next(choices))

    async def _drop_all(self) -> None:
        self._scheduler.running = []
        self._scheduler.waiting = deque()
        self._forget()

    async def _take_weights(self, plan: SyncPlan) -> Receipt:
        """Load weights; those that share the policy's memory are there already. Caches are dropped in any case."""
        self._forget()  # first: a transfer that breaks off leaves some of the new weights
        return await self._thread.run(self._load, plan)

    @torch.no_grad()
    def _load(self, plan: SyncPlan) -> Receipt:
        own = dict(self._model.named_parameters())
        link = receiver(plan)
        received = set()
        for name, tensor in link.receive(plan):
            if name not in own or own[name].shape != tensor.shape:
                there = tuple(own[name].shape) if name in own else "none"
                raise EngineError(
                    f"the policy sends {name} of shape {tuple(tensor.shape)} and the engine's model has {there}; load "
                    "the engine from the policy's folder"
                )
            received.add(name)
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        if missing := sorted(own.keys() - received):
            raise EngineError(f"the policy has no {missing[0]} ({len(missing)} tensors in all) for the engine's model")
        return link.receipt

    async def _release_memory(self) -> None:
        self._forget()

    async def _take_memory(self) -> None:
        """Memory is taken when it is written."""

    async def _shut_down(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """Drop all keys and values; sequences that are held are read again."""
        self._scheduler.restart_all()
        self._memory.release()
        self._head.release()

    @torch.inference_mode()
    def _forward(self, step: Step) -> list[Choice]:
        """One forward pass; the next token of every sequence that has read all it has, in the order of the rows."""
        self._memory.copy(step.copies)
        device = self._model.device
        ends = torch.tensor([row.n_new for row in step.rows]).cumsum(0) - 1
        is_complete = torch.tensor([row.is_complete for row in step.rows])
        with autocast(device, self._bf16):
            states = hidden_states(self._model, self._memory, step.rows)  # (N, H)
            states = states[ends[is_complete].to(device)]  # (b, H)
            draws = [self._draw(row.sequence) for row in step.rows if row.is_complete]
            n_rows = self._head.max_rows
            return [
                choice
                for i in range(0, len(draws), n_rows)
                for choice in choose_tokens(self._head.logits(states[i : i + n_rows]), draws[i : i + n_rows])
            ]

    def _draw(self, sequence: CachedSequence) -> Draw:
        return Draw(sequence.sampling, sequence.request.seed, sequence.token_ids, sequence.n_prompt, self._eos_ids)
