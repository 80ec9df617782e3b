"""What engines that work in steps have in common: an asyncio front, and one loop that takes step after step.

A step is one forward pass. Sequences join and leave between steps; requests and results belong to the event loop, and
whatever takes long happens in one other thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineInfo, EngineRequest, EngineResult, TokenChunk
from skyrl_train.inference_engines.sampling import Choice
from skyrl_train.inference_engines.sequence import ActiveSequence, Call
from skyrl_train.inference_engines.stopping import StopRules
from skyrl_train.inference_engines.thread import EngineThread
from skyrl_train.weight_sync import Receipt, SyncPlan

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=ActiveSequence)


class SteppedEngine(ABC, Generic[S]):
    """The part of an `InferenceEngine` that does not depend on who runs the model."""

    n_weight_copies = 1

    def __init__(
        self,
        *,
        context_length: int,
        vocab_size: int,
        eos_ids: frozenset[int],
        tokenizer: PreTrainedTokenizerBase,
        thread: EngineThread,
    ) -> None:
        self.info = EngineInfo(context_length, context_length)
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._rules = StopRules(eos_ids, tokenizer)
        self._thread = thread
        self._weight_version = 0
        self._is_paused, self._is_asleep = False, False
        self._n_holds = 0  # reasons not to take another step
        self._between_steps = asyncio.Event()
        self._between_steps.set()
        self._loop_task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._broken_by: Exception | None = None

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        """See `InferenceEngine.generate`."""
        if not requests:
            self._check_ready()
            return []
        call = Call.of(len(requests))
        self._submit(requests, call)
        await call.done
        return call.all_results()

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `InferenceEngine.stream`."""
        call = Call.of(1, is_stream=True)
        self._submit([request], call)
        assert call.chunks is not None
        try:
            while (chunk := await call.chunks.get()) is not None:
                yield chunk
            call.done.result()
        finally:
            if not call.done.cancel() and not call.done.cancelled():
                call.done.exception()  # a consumer that left before the error has no use for it

    def _submit(self, requests: Sequence[EngineRequest], call: Call) -> None:
        self._check_ready()
        self._add([self._admit(request, call, index) for index, request in enumerate(requests)])
        self._start_loop()

    async def abort(self, session_id: str | None = None) -> None:
        """See `InferenceEngine.abort`."""
        for sequence in self._unfinished():
            if session_id is None or sequence.request.session_id == session_id:
                sequence.stop_reason = "abort"
        self._start_loop()

    async def pause(self) -> None:
        """See `InferenceEngine.pause`."""
        self._check_usable()
        if self._is_paused:
            raise EngineError("the engine is paused already; whoever paused it must resume it first")
        self._is_paused = True
        self._n_holds += 1
        try:
            await self._between_steps.wait()
        except asyncio.CancelledError:
            self._unpause()
            raise

    async def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        if not self._is_paused:
            raise EngineError("the engine is not paused")
        self._unpause()

    def _unpause(self) -> None:
        self._is_paused = False
        self._let_go()

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        """See `InferenceEngine.receive_weights`."""
        self._check_ready()
        n_unfinished = len(self._unfinished())
        if n_unfinished and not self._is_paused:
            raise EngineError(
                f"weights changed to version {plan.version} while {n_unfinished} sequences were being generated; "
                "pause() the engine first, or wait for generate() to return"
            )
        async with self._hold():  # a call that was cancelled may still be in a step
            receipt = await self._take_weights(plan)
            self._weight_version = plan.version
        return receipt

    async def sleep(self) -> None:
        """See `InferenceEngine.sleep`."""
        if self._is_asleep:
            return
        self._check_ready()
        if n_unfinished := len(self._unfinished()):
            raise EngineError(f"the engine cannot sleep while {n_unfinished} sequences are being generated")
        self._is_asleep = True
        async with self._hold():
            await self._release_memory()

    async def wake_up(self) -> None:
        """See `InferenceEngine.wake_up`."""
        if self._is_asleep:
            self._check_usable()
            await self._take_memory()
            self._is_asleep = False

    async def close(self) -> None:
        """See `InferenceEngine.close`. It goes on when the call is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    # -- what an engine adds

    @abstractmethod
    async def end_session(self, session_id: str) -> None:
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
    def _take_finished(self) -> list[S]:
        """The sequences that are over; they are held no more."""

    @abstractmethod
    async def _step(self) -> None:
        """Take one step with the sequences that are held, and `_append` what it brings."""

    @abstractmethod
    async def _drop_all(self) -> None:
        """Hold no sequence and nothing that was computed, after a step that failed."""

    @abstractmethod
    async def _take_weights(self, plan: SyncPlan) -> Receipt:
        """Load the weights of a sync; sequences that are held are read again."""

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

    def _start_loop(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run())

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[None]:
        """No step is taken within, and nothing is held that is over."""
        self._n_holds += 1
        try:
            await self._between_steps.wait()
            self._hand_out()
            yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._n_holds -= 1
        self._start_loop()

    async def _run(self) -> None:
        """Take steps while there is something to do and nobody holds the engine."""
        while self._hand_out():
            self._between_steps.clear()
            try:
                await self._step()
            except Exception as error:  # the boundary of a request: every caller learns why, and the engine goes on
                logger.exception("A generation step failed")
                await self._start_over(error)
            finally:
                self._between_steps.set()

    def _hand_out(self) -> bool:
        """Hand out what is complete, drop what nobody waits for any more; whether there is a step to do."""
        for sequence in self._take_finished():
            if sequence.stop_reason is not None and not sequence.call.done.done():
                result = sequence.result()
                sequence.put_chunk(result)
                sequence.call.deliver(sequence.index, result)
        return not self._n_holds and any(True for _ in self._held())

    async def _start_over(self, error: Exception) -> None:
        """Everyone who waits gets the error, and nothing is left that the failed step may have spoiled."""
        self._tell_waiting(str(error) if isinstance(error, EngineError) else f"generation failed: {error!r}", error)
        try:
            await self._drop_all()
        except Exception as worse:
            logger.exception("The engine cannot go on")
            self._broken_by = worse
            self._n_holds += 1
            self._tell_waiting(f"the engine cannot go on: {worse!r}", worse)

    async def _close(self) -> None:
        self._n_holds += 1
        self._tell_waiting("the engine was closed while requests were waiting")
        try:
            await self._between_steps.wait()
            if self._loop_task is not None:
                await asyncio.wait([self._loop_task])
            self._hand_out()
            await self._shut_down()
        finally:
            self._thread.close()

    def _append(self, sequence: S, choice: Choice) -> None:
        """Add a sampled token to its sequence, unless that ended while the step ran."""
        if sequence.is_over:
            return
        if not math.isfinite(choice.logprob):
            raise EngineError(
                f"the model's logits are not finite (weight version {self._weight_version}): the policy has "
                "diverged; resume from an earlier checkpoint with a lower learning rate"
            )
        sequence.append(choice, self._weight_version)
        sequence.stop_reason = self._rules.stop_reason(sequence)
        if sequence.stop_reason is None:
            sequence.put_chunk()

    # -- requests

    def _admit(self, request: EngineRequest, call: Call, index: int) -> S:
        n_prompt = len(request.prompt_ids)
        if not 0 < n_prompt < self.info.context_length:
            raise EngineError(
                f"a prompt of {n_prompt} tokens: this model takes between 1 and {self.info.context_length - 1}; lower "
                "generator.max_input_length or shorten the prompt"
            )
        lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
        if lowest < 0 or highest >= self._vocab_size:
            raise EngineError(
                f"a prompt with token {lowest if lowest < 0 else highest}: this model knows 0 to "
                f"{self._vocab_size - 1}; use the tokenizer of its folder"
            )
        if unknown := [i for i in request.sampling.stop_token_ids if not 0 <= i < self._vocab_size]:
            raise EngineError(f"stop_token_ids={unknown}: this model knows 0 to {self._vocab_size - 1}")
        max_tokens = min(n_prompt + request.sampling.max_new_tokens, self.info.context_length)
        return self._sequence(request, call, index, max_tokens)

    def _check_usable(self) -> None:
        if self._closing is not None:
            raise EngineError("the engine is closed; make another")
        if self._broken_by is not None:
            raise EngineError(f"the engine cannot go on after {self._broken_by!r}; make another") from self._broken_by

    def _check_ready(self) -> None:
        self._check_usable()
        if self._is_asleep:
            raise EngineError("the engine is asleep; wake_up() it first")

    def _unfinished(self) -> list[S]:
        return [sequence for sequence in self._held() if not sequence.is_over]

    def _tell_waiting(self, message: str, cause: Exception | None = None) -> None:
        """Everyone who waits gets an error of their own."""
        for sequence in self._unfinished():
            error = EngineError(message)
            error.__cause__ = cause
            if not sequence.call.done.done():
                sequence.call.done.set_exception(error)
