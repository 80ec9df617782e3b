"""The vLLM engine: an asyncio front, and one step loop over vLLM's engine core.

All calls into vLLM happen in one thread; requests and results belong to the event loop's. vLLM schedules, stores keys
and values, and runs the model; tokens are chosen as the embedded engine chooses them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, OnTokens
from skyrl_train.inference_engines.hf.sequence import Call
from skyrl_train.inference_engines.hf.sequence import Sequence as Sampled
from skyrl_train.inference_engines.hf.stopping import StopRules
from skyrl_train.inference_engines.vllm.core import Core, Output, Weights

logger = logging.getLogger(__name__)


class VLLMEngine:
    """Generates with vLLM, in this process and with its own copy of the weights. A process has one at a time.

    Sessions need no cache of their own: vLLM keeps whole blocks of keys and values by the tokens that they stand for,
    until their room is needed. `end_session` has nothing to do, and a block that is not full is read again.
    """

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        weights: Weights,
        *,
        dtype: str,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        gpu_memory_utilization: float,
        enforce_eager: bool,
        max_cache_bytes: int | None = None,
        max_model_len: int | None = None,
        engine_init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the model at `path`; this takes seconds to minutes.

        Args:
            path: a Hugging Face folder.
            tokenizer: the policy's, to find stop strings.
            weights: the policy's current tensors, named as in a checkpoint.
            dtype: what the engine computes in, e.g. `bfloat16`.
            max_num_seqs: how many sequences run at once.
            max_num_batched_tokens: how many tokens a step reads.
            gpu_memory_utilization: fraction of the device's memory for weights, activations, keys and values.
            enforce_eager: run the model without CUDA graphs and compilation, whose threads would outlive the engine.
            max_cache_bytes: of keys and values; None for what `gpu_memory_utilization` leaves.
            max_model_len: longest sequence; None for the model's own limit.
            engine_init_kwargs: further fields of vLLM's `EngineArgs`, which go before the ones above.

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
        self._weights = weights
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-engine")
        try:
            self._core = self._executor.submit(Core, options, tokenizer.eos_token_id).result()
        except EngineError:
            self._executor.shutdown()
            raise
        self.context_length = self._core.context_length
        self._rules = _Rules(self._core.eos_ids, tokenizer)
        self._weight_version = 0
        self._is_paused, self._is_asleep, self._is_closed = False, False, False
        self._n_requests = 0  # so far
        self._waiting: dict[str, Sampled] = {}  # vLLM has not heard of them
        self._running: dict[str, Sampled] = {}
        self._dropped: list[str] = []  # vLLM still holds them
        self._loop_task: asyncio.Task[None] | None = None

    async def generate(
        self, requests: Sequence[EngineRequest], on_tokens: OnTokens | None = None
    ) -> list[EngineResult]:
        """See `InferenceEngine.generate`."""
        self._check_open()
        if not requests:
            return []
        done = asyncio.get_running_loop().create_future()
        call = Call([None] * len(requests), len(requests), done, on_tokens)
        sequences = [self._sequence(request, call, index) for index, request in enumerate(requests)]
        for number, sequence in enumerate(sequences, start=self._n_requests):
            self._waiting[str(number)] = sequence
        self._n_requests += len(sequences)
        self._start_loop()
        await done
        return [result for result in call.results if result is not None]

    def abort(self, session_id: str | None = None) -> None:
        """See `InferenceEngine.abort`."""
        for sequence in self._unfinished():
            if session_id is None or sequence.request.session_id == session_id:
                sequence.stop_reason = "abort"
        self._start_loop()

    async def pause(self) -> None:
        """See `InferenceEngine.pause`."""
        if self._is_paused:
            raise EngineError("the engine is paused already; whoever paused it must resume it first")
        self._is_paused = True
        await self._last_step()

    def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        if not self._is_paused:
            raise EngineError("the engine is not paused")
        self._is_paused = False
        self._start_loop()

    def end_session(self, session_id: str) -> None:
        """See `InferenceEngine.end_session`. What a session stored may serve others; vLLM drops it in time."""

    async def sync_weights(self, weight_version: int) -> None:
        """See `InferenceEngine.sync_weights`. Every tensor of the policy is copied into vLLM's model.

        Raises:
            EngineError: also if the policy's tensors do not fit vLLM's model.
        """
        self._check_open()
        n_unfinished = len(self._unfinished())
        if n_unfinished and not self._is_paused:
            raise EngineError(
                f"weights changed to version {weight_version} while {n_unfinished} sequences were being generated; "
                "pause() the engine first, or wait for generate() to return"
            )
        await self._last_step()  # of calls that were cancelled
        await self._in_thread(self._core.load_weights, self._weights, self._take_dropped())
        self._weight_version = weight_version

    async def sleep(self) -> None:
        """See `InferenceEngine.sleep`. On a CPU, vLLM keeps its memory."""
        if self._is_asleep:
            return
        self._check_open()
        if n_unfinished := len(self._unfinished()):
            raise EngineError(f"the engine cannot sleep while {n_unfinished} sequences are being generated")
        self._is_asleep = True
        await self._last_step()
        await self._in_thread(self._core.sleep, self._take_dropped())

    async def wake_up(self) -> None:
        """See `InferenceEngine.wake_up`."""
        if self._is_asleep:
            await self._in_thread(self._core.wake_up)
            self._is_asleep = False

    async def close(self) -> None:
        """See `InferenceEngine.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._loop_task is not None and not self._loop_task.done():
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        await self._in_thread(self._core.shutdown)  # after the step it is in
        self._executor.shutdown()
        self._fail(EngineError("the engine was closed while requests were waiting"))

    # -- the step loop

    def _start_loop(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run())

    async def _last_step(self) -> None:
        """Wait until no step is running; the loop ends by itself when it is paused or has nothing to do."""
        if self._loop_task is not None and not self._loop_task.done():
            await asyncio.wait([self._loop_task])

    async def _run(self) -> None:
        while self._has_work():
            try:
                new = self._take_waiting()
                self._take(await self._in_thread(self._core.step, new, self._take_dropped()))
            except Exception as error:  # the boundary of a request: every caller learns why, and the engine goes on
                logger.exception("A generation step failed")
                self._fail(error if isinstance(error, EngineError) else EngineError(f"generation failed: {error!r}"))
                await self._in_thread(self._core.forget, self._take_dropped())

    def _has_work(self) -> bool:
        """Hand out what is complete, drop what nobody waits for any more; whether there is a step to do."""
        for held in (self._waiting, self._running):
            for request_id, sequence in [item for item in held.items() if item[1].is_over]:
                del held[request_id]
                if held is self._running:
                    self._dropped.append(request_id)
                if sequence.stop_reason is not None:
                    sequence.call.deliver(sequence.index, sequence.result())
        return not self._is_paused and bool(self._running or self._waiting)

    def _take(self, outputs: Sequence[Output]) -> None:
        """Note what was sampled."""
        for output in outputs:
            sequence = self._running.get(output.request_id)
            if sequence is None or sequence.is_over:  # aborted, or cancelled, while the step ran
                continue
            if sequence.n_reused is None:
                sequence.n_reused = output.n_cached
            for choice in output.choices:
                if not math.isfinite(choice.logprob):
                    raise EngineError(
                        f"the model's logits are not finite (weight version {self._weight_version}): the policy has "
                        "diverged; resume from an earlier checkpoint with a lower learning rate"
                    )
                sequence.append(choice, self._weight_version)
                sequence.stop_reason = self._rules.stop_reason(sequence)
            sequence.tell()
            if output.is_over and sequence.stop_reason is None:
                raise EngineError("vLLM gave up on a request; its own messages above say why")

    def _take_waiting(self) -> dict[str, Sampled]:
        new, self._waiting = self._waiting, {}
        self._running |= new
        return new

    def _take_dropped(self) -> list[str]:
        dropped, self._dropped = self._dropped, []
        return dropped

    async def _in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)

    # -- requests and results

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed; make another")
        if self._is_asleep:
            raise EngineError("the engine is asleep; wake_up() it first")

    def _sequence(self, request: EngineRequest, call: Call, index: int) -> Sampled:
        n_prompt = len(request.prompt_ids)
        if not 0 < n_prompt < self.context_length:
            raise EngineError(
                f"a prompt of {n_prompt} tokens: this model takes between 1 and {self.context_length - 1}; lower "
                "generator.max_input_length or shorten the prompt"
            )
        lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
        if lowest < 0 or highest >= self._core.vocab_size:
            raise EngineError(
                f"a prompt with token {lowest if lowest < 0 else highest}: this model knows 0 to "
                f"{self._core.vocab_size - 1}; use the tokenizer of its folder"
            )
        max_tokens = min(n_prompt + request.sampling.max_new_tokens, self.context_length)
        return Sampled(request, call, index, max_tokens, list(request.prompt_ids))

    def _unfinished(self) -> list[Sampled]:
        held = chain(self._running.values(), self._waiting.values())
        return [sequence for sequence in held if not sequence.is_over]

    def _fail(self, error: EngineError) -> None:
        """Tell everyone who waits."""
        for sequence in self._unfinished():
            if not sequence.call.done.done():
                sequence.call.done.set_exception(error)
        self._dropped.extend(self._running)
        self._running, self._waiting = {}, {}


class _Rules(StopRules):
    """The rules of a model that is known by the tokens that end a sequence."""

    def __init__(self, eos_ids: frozenset[int], tokenizer: PreTrainedTokenizerBase) -> None:
        self.eos_ids = eos_ids
        self._tokenizer = tokenizer
