"""The vLLM engine: vLLM schedules, caches and runs the model; our own sampler chooses the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest
from skyrl_train.inference_engines.sequence import ActiveSequence
from skyrl_train.inference_engines.stepped import EngineThread, SteppedEngine
from skyrl_train.inference_engines.vllm.core import Core
from skyrl_train.weight_sync import Receipt, Receiver, SyncPlan


class VLLMEngine(SteppedEngine[ActiveSequence]):
    """An engine that generates with vLLM, in this process and with its own copy of the weights. A process has one at
    a time.

    Sessions need no cache of their own: vLLM keeps full blocks of keys and values, indexed by their tokens, until it
    needs their space. A partial block is read again.
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
            dtype: dtype of weights and activations, e.g. `bfloat16`.
            max_num_seqs: maximum number of sequences that run at once.
            max_num_batched_tokens: maximum number of tokens per step.
            gpu_memory_utilization: fraction of the device's memory for weights, activations, keys and values.
            enforce_eager: run the model without CUDA graphs and compilation, whose threads would outlive the engine.
            max_cache_bytes: size of keys and values; None for the rest of `gpu_memory_utilization`.
            max_model_len: maximum sequence length; None for the model's own limit.
            engine_init_kwargs: fields of vLLM's `EngineArgs`, which override the ones above.
            executor: one thread in which vLLM runs; None to start one.

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
        self._core = thread.run_blocking(Core, options, tokenizer.eos_token_id)
        super().__init__(
            context_length=self._core.context_length,
            vocab_size=self._core.vocab_size,
            eos_ids=self._core.eos_ids,
            tokenizer=tokenizer,
            thread=thread,
        )
        self._n_requests = 0  # received so far
        self._waiting: dict[str, ActiveSequence] = {}  # not yet passed to vLLM
        self._running: dict[str, ActiveSequence] = {}
        self._dropped: list[str] = []  # to be removed from vLLM

    async def end_session(self, session_id: str) -> None:
        """Do nothing: other sequences may use the blocks of a session, and vLLM evicts them in time."""

    def _new_sequence(self, request: EngineRequest, max_tokens: int) -> ActiveSequence:
        return ActiveSequence(request, max_tokens)

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

    async def _load_weights(self, plan: SyncPlan) -> Receipt:
        receiver = Receiver(plan)
        await self._thread.run(self._core.load_weights, iter(receiver), self._take_dropped())
        return receiver.receipt

    async def _release_memory(self) -> None:
        await self._thread.run(self._core.sleep, self._take_dropped())

    async def _restore_memory(self) -> None:
        await self._thread.run(self._core.wake_up)

    async def _shut_down(self) -> None:
        await self._thread.run(self._core.shutdown)

    def _take_dropped(self) -> list[str]:
        dropped, self._dropped = self._dropped, []
        return dropped
