"""The vLLM engine: vLLM schedules, stores keys and values, and runs the model; tokens are chosen as elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest
from skyrl_train.inference_engines.sequence import ActiveSequence, Call
from skyrl_train.inference_engines.stepped import SteppedEngine
from skyrl_train.inference_engines.thread import EngineThread
from skyrl_train.inference_engines.vllm.core import Core
from skyrl_train.weight_sync import Receipt, SyncPlan, receiver


class VLLMEngine(SteppedEngine[ActiveSequence]):
    """Generates with vLLM, in this process and with its own copy of the weights. A process has one at a time.

    Sessions need no cache of their own: vLLM keeps whole blocks of keys and values by the tokens that they stand for,
    until their room is needed. `end_session` has nothing to do, and a block that is not full is read again.
    """

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dtype: str,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        gpu_memory_utilization: float,
        enforce_eager: bool,
        max_cache_bytes: int | None = None,
        max_model_len: int | None = None,
        engine_init_kwargs: Mapping[str, Any] | None = None,
        executor: ThreadPoolExecutor | None = None,
    ) -> None:
        """Load the model at `path`; this takes seconds to minutes.

        Args:
            path: a Hugging Face folder.
            tokenizer: the policy's, to find stop strings.
            dtype: what the engine computes in, e.g. `bfloat16`.
            max_num_seqs: how many sequences run at once.
            max_num_batched_tokens: how many tokens a step reads.
            gpu_memory_utilization: fraction of the device's memory for weights, activations, keys and values.
            enforce_eager: run the model without CUDA graphs and compilation, whose threads would outlive the engine.
            max_cache_bytes: of keys and values; None for what `gpu_memory_utilization` leaves.
            max_model_len: longest sequence; None for the model's own limit.
            engine_init_kwargs: further fields of vLLM's `EngineArgs`, which go before the ones above.
            executor: has one thread, in which vLLM runs; None for one of the engine's own.

        Raises:
            EngineError: vLLM does not start with these options, or the model is a mixture of experts.
        """
        options = {
            "model": path,
            "dtype": dtype,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory_bytes": max_cache_bytes,
            "max_model_len": max_model_len,
            "enforce_eager": enforce_eager,
            **(engine_init_kwargs or {}),
        }
        thread = EngineThread(executor, "vllm-engine")
        self._core = thread.begin(Core, options, tokenizer.eos_token_id)
        super().__init__(
            context_length=self._core.context_length,
            vocab_size=self._core.vocab_size,
            eos_ids=self._core.eos_ids,
            tokenizer=tokenizer,
            thread=thread,
        )
        self._n_requests = 0  # so far
        self._waiting: dict[str, ActiveSequence] = {}  # vLLM has not heard of them
        self._running: dict[str, ActiveSequence] = {}
        self._dropped: list[str] = []  # vLLM still holds them

    async def end_session(self, session_id: str) -> None:
        """See `InferenceEngine.end_session`. What a session stored may serve others; vLLM drops it in time."""

    def _sequence(self, request: EngineRequest, call: Call, index: int, max_tokens: int) -> ActiveSequence:
        return ActiveSequence(request, call, index, max_tokens, list(request.prompt_ids))

    def _add(self, sequences: Sequence[ActiveSequence]) -> None:
        for number, sequence in enumerate(sequences, start=self._n_requests):
            self._waiting[str(number)] = sequence
        self._n_requests += len(sequences)

    def _held(self) -> Iterable[ActiveSequence]:
        return chain(self._running.values(), self._waiting.values())

    def _take_finished(self) -> list[ActiveSequence]:
        over: list[ActiveSequence] = []
        for held in (self._waiting, self._running):
            for request_id in [key for key, sequence in held.items() if sequence.is_over]:
                over.append(held.pop(request_id))
                if held is self._running:
                    self._dropped.append(request_id)
        return over

    async def _step(self) -> None:
        new, self._waiting = self._waiting, {}
        self._running |= new
        for output in await self._thread.run(self._core.step, new, self._take_dropped()):
            sequence = self._running.get(output.request_id)
            if sequence is None:
                continue
            if sequence.n_reused is None:
                sequence.n_reused = output.n_reused
            for choice in output.choices:
                self._append(sequence, choice)
            if output.is_over and not sequence.is_over:
                raise EngineError("vLLM gave up on a request; its own messages above say why")

    async def _drop_all(self) -> None:
        self._dropped.extend(self._running)
        self._running, self._waiting = {}, {}
        await self._thread.run(self._core.forget, self._take_dropped())

    async def _take_weights(self, plan: SyncPlan) -> Receipt:
        """Copy every tensor into vLLM's model; EngineError if they do not fit."""
        link = receiver(plan)
        await self._thread.run(self._core.load_weights, link.receive(plan), self._take_dropped())
        return link.receipt

    async def _release_memory(self) -> None:
        """On a CPU, vLLM keeps its memory."""
        await self._thread.run(self._core.sleep, self._take_dropped())

    async def _take_memory(self) -> None:
        await self._thread.run(self._core.wake_up)

    async def _shut_down(self) -> None:
        await self._thread.run(self._core.shutdown)

    def _take_dropped(self) -> list[str]:
        dropped, self._dropped = self._dropped, []
        return dropped
