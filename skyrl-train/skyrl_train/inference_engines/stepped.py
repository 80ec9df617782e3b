"""What engines that work in steps have in common: an asyncio front, and one loop that takes step after step.

A step is one forward pass. Sequences join and leave between steps; requests and results belong to the event loop, and
whatever takes long happens in one other thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, OnTokens
from skyrl_train.inference_engines.sampling import Choice
from skyrl_train.inference_engines.sequence import ActiveSequence, Call
from skyrl_train.inference_engines.stopping import StopRules

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=ActiveSequence)
T = TypeVar("T")


class SteppedEngine(ABC, Generic[S]):
    """The part of an `InferenceEngine` that does not depend on who runs the model."""

    def __init__(
        self,
        *,
        context_length: int,
        vocab_size: int,
        eos_ids: frozenset[int],
        tokenizer: PreTrainedTokenizerBase,
        executor: ThreadPoolExecutor,
        is_own_executor: bool,
    ) -> None:
        """`executor` has one thread; `close` ends it if it is the engine's own."""
        self.context_length = context_length
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._rules = StopRules(eos_ids, tokenizer)
        self._executor = executor
        self._is_own_executor = is_own_executor
        self._weight_version = 0
        self._is_paused, self._is_asleep, self._is_closed = False, False, False
        self._loop_task: asyncio.Task[None] | None = None

    async def generate(
        self, requests: Sequence[EngineRequest], on_tokens: OnTokens | None = None
    ) -> list[EngineResult]:
        """See `InferenceEngine.generate`."""
        self._check_ready()
        if not requests:
            return []
        done = asyncio.get_running_loop().create_future()
        call = Call([None] * len(requests), len(requests), done, on_tokens)
        self._add([self._admit(request, call, index) for index, request in enumerate(requests)])
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

    async def sync_weights(self, weight_version: int) -> None:
        """See `InferenceEngine.sync_weights`."""
        self._check_ready()
        n_unfinished = len(self._unfinished())
        if n_unfinished and not self._is_paused:
            raise EngineError(
                f"weights changed to version {weight_version} while {n_unfinished} sequences were being generated; "
                "pause() the engine first, or wait for generate() to return"
            )
        await self._last_step()  # of calls that were cancelled
        await self._take_weights()
        self._weight_version = weight_version

    async def sleep(self) -> None:
        """See `InferenceEngine.sleep`."""
        if self._is_asleep:
            return
        self._check_ready()
        if n_unfinished := len(self._unfinished()):
            raise EngineError(f"the engine cannot sleep while {n_unfinished} sequences are being generated")
        self._is_asleep = True
        await self._last_step()
        await self._release_memory()

    async def wake_up(self) -> None:
        """See `InferenceEngine.wake_up`."""
        if self._is_asleep:
            await self._take_memory()
            self._is_asleep = False

    async def close(self) -> None:
        """See `InferenceEngine.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._loop_task is not None and not self._loop_task.done():
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        await self._shut_down()
        if self._is_own_executor:
            self._executor.shutdown()
        self._tell_waiting(EngineError("the engine was closed while requests were waiting"))

    # -- what an engine adds

    @abstractmethod
    def end_session(self, session_id: str) -> None:
        """See `InferenceEngine.end_session`."""

    @abstractmethod
    def _sequence(self, request: EngineRequest, call: Call, index: int, max_tokens: int) -> S:
        """The sequence of a request, `max_tokens` with its prompt at most; EngineError if it cannot be served."""

    @abstractmethod
    def _add(self, sequences: Sequence[S]) -> None:
        """Hold new sequences, for the next step to take up."""

    @abstractmethod
    def _held(self) -> Iterable[S]:
        """All sequences that were added and have not been taken."""

    @abstractmethod
    def _take_over(self) -> list[S]:
        """The sequences that are over; they are held no more."""

    @abstractmethod
    async def _step(self) -> None:
        """Take one step with the sequences that are held, and `_append` what it brings."""

    @abstractmethod
    async def _drop_all(self) -> None:
        """Hold no sequence and nothing that was computed, after a step that failed."""

    @abstractmethod
    async def _take_weights(self) -> None:
        """Compute with the policy's current weights; sequences that are held are read again."""

    @abstractmethod
    async def _release_memory(self) -> None:
        """Give memory back. Nothing is held."""

    @abstractmethod
    async def _take_memory(self) -> None:
        """The inverse of `_release_memory`."""

    @abstractmethod
    async def _shut_down(self) -> None:
        """Release everything, after the step that runs."""

    # -- the loop

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        """Run something in the engine's thread, when its turn comes."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)

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
                await self._step()
            except Exception as error:  # the boundary of a request: every caller learns why, and the engine goes on
                logger.exception("A generation step failed")
                self._tell_waiting(
                    error if isinstance(error, EngineError) else EngineError(f"generation failed: {error!r}")
                )
                await self._drop_all()

    def _has_work(self) -> bool:
        """Hand out what is complete, drop what nobody waits for any more; whether there is a step to do."""
        for sequence in self._take_over():
            if sequence.stop_reason is not None:
                sequence.call.deliver(sequence.index, sequence.result())
        return not self._is_paused and any(True for _ in self._held())

    def _append(self, sequence: S, choice: Choice) -> None:
        """Note what was sampled for a sequence, unless it ended while the step ran."""
        if sequence.is_over:
            return
        if not math.isfinite(choice.logprob):
            raise EngineError(
                f"the model's logits are not finite (weight version {self._weight_version}): the policy has "
                "diverged; resume from an earlier checkpoint with a lower learning rate"
            )
        sequence.append(choice, self._weight_version)
        sequence.stop_reason = self._rules.stop_reason(sequence)
        sequence.tell()

    # -- requests

    def _admit(self, request: EngineRequest, call: Call, index: int) -> S:
        n_prompt = len(request.prompt_ids)
        if not 0 < n_prompt < self.context_length:
            raise EngineError(
                f"a prompt of {n_prompt} tokens: this model takes between 1 and {self.context_length - 1}; lower "
                "generator.max_input_length or shorten the prompt"
            )
        lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
        if lowest < 0 or highest >= self._vocab_size:
            raise EngineError(
                f"a prompt with token {lowest if lowest < 0 else highest}: this model knows 0 to "
                f"{self._vocab_size - 1}; use the tokenizer of its folder"
            )
        max_tokens = min(n_prompt + request.sampling.max_new_tokens, self.context_length)
        return self._sequence(request, call, index, max_tokens)

    def _check_ready(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed; make another")
        if self._is_asleep:
            raise EngineError("the engine is asleep; wake_up() it first")

    def _unfinished(self) -> list[S]:
        return [sequence for sequence in self._held() if not sequence.is_over]

    def _tell_waiting(self, error: EngineError) -> None:
        """Everyone who waits gets the error."""
        for sequence in self._unfinished():
            if not sequence.call.done.done():
                sequence.call.done.set_exception(error)
