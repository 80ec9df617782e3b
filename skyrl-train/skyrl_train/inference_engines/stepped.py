"""Base class of engines that work in steps: an asyncio interface, and one loop that takes step after step.

A step is one forward pass. Requests and results belong to the event loop, and slow work runs in one other thread.

The invariant is that nothing changes during a step: sequences join and leave, weights change, and memory is released
only between steps. Two things enforce it. `_n_holds` counts the calls that want no step to start, and the loop ends
when it is above 0. `_between_steps` is set while no step runs. A call that changes something takes a hold, waits for
`_between_steps`, makes its change, and releases the hold. The release starts the loop again:

    generate(A, B)      step 1   step 2                                           step 3   step 4
    pause()                        hold, wait until step 2 ends
    receive_weights()                                   hold, load, release
    resume()                                                               release

The hold of `pause` stays until `resume`, so the weights change between step 2 and step 3. A and B keep their tokens,
and step 3 reads them again with the new weights. Holds are counted, so they may overlap.

If a step runs out of memory, the embedded engines repeat it with fewer tokens or sequences. If a step fails in another
way, all waiting requests fail and all caches are dropped. If that works, the engine is usable again. Every
request's future is resolved exactly once: with a result, with an error, or by its caller's cancellation.
"""

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from skyrl_gym.stop_reasons import StopReason
from skyrl_train.errors import EngineError, EngineLostError, OutOfMemoryError
from skyrl_train.inference_engines.base import EngineInfo, EngineRequest, EngineResult, TokenChunk, WakeUp
from skyrl_train.inference_engines.sampling import SampledToken
from skyrl_train.inference_engines.sequence import ActiveSequence, SequenceQueue, find_stop_reason
from skyrl_train.out_of_memory import is_out_of_memory
from skyrl_train.threads import ComputeThread
from skyrl_train.watchdog import ENGINE
from skyrl_train.weight_sync import Receipt, SyncPlan

logger = logging.getLogger(__name__)

MemoryPart = Literal["weights", "kv_cache"]

T = TypeVar("T")
S = TypeVar("S", bound=ActiveSequence)


class EngineFacts(NamedTuple):
    """Facts about an engine and its model, as plain values that can travel over HTTP."""

    context_length: int
    vocab_size: int
    eos_ids: list[int]
    n_workers: int = 1  # processes that receive new weights
    can_sleep: bool = False  # the backend can release its memory
    dtype: str | None = None  # of the weights, e.g. "bfloat16", if known


class EngineThread:
    """The thread in which an engine computes: a thread of the engine, or the trainer's."""

    def __init__(self, shared: ThreadPoolExecutor | None, name: str) -> None:
        """Use `shared`, an executor with one thread, or start a thread called `name`."""
        self._executor = shared or ComputeThread(torch.get_num_threads(), name)
        self._is_own = shared is None

    def run_blocking(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` in the thread and wait for it. If it raises, the engine's own thread ends."""
        try:
            return self._executor.submit(function, *args).result()
        except BaseException:
            self.close()
            raise

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def close(self) -> None:
        """End the thread, unless it is shared."""
        if self._is_own:
            self._executor.shutdown()


class SteppedEngine(ABC, Generic[S]):
    """Base class of engines with everything in `InferenceEngine` except running the model."""

    _image_fault: ClassVar[str] = (
        "this engine reads only text; use a vision-language model with generator.backend=hf or vllm"
    )
    """End of the error for a request with images, if the engine reads none."""

    def __init__(self, facts: EngineFacts, tokenizer: PreTrainedTokenizerBase, thread: EngineThread) -> None:
        weight_dtype = getattr(torch, facts.dtype or "", None)  # None for "auto"
        self.info = EngineInfo(facts.context_length, facts.context_length, weight_dtype)
        self._facts = facts
        self._eos_ids = frozenset(facts.eos_ids)
        self._tokenizer = tokenizer
        self._thread = thread
        self._queue: SequenceQueue[S] = SequenceQueue()
        self._weight_version = 0
        self._is_paused, self._is_asleep = False, False
        self._has_weights = True  # False while weights are released
        self._n_holds = 0  # while positive, no step starts
        self._between_steps = asyncio.Event()
        self._between_steps.set()
        self._loop_task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._broken_by: Exception | None = None

    @property
    def n_weight_copies(self) -> int:
        return self._facts.n_workers

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        return await asyncio.gather(*self._submit(requests))  # cancelling it cancels every request

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        chunks: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        (done,) = self._submit([request], chunks)
        done.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            done.result()
        finally:
            if not done.cancel() and not done.cancelled():
                done.exception()  # marks the error as retrieved, so asyncio does not log it for a consumer that left

    def _submit(
        self, requests: Sequence[EngineRequest], chunks: asyncio.Queue[TokenChunk | None] | None = None
    ) -> list[asyncio.Future[EngineResult]]:
        self._check_ready()
        sequences = [self._admit(request) for request in requests]
        results: list[asyncio.Future[EngineResult]] = []
        for sequence in sequences:
            sequence.done, sequence.chunks = asyncio.get_running_loop().create_future(), chunks
            results.append(sequence.done)
        self._queue.waiting.extend(sequences)
        self._start_loop()
        return results

    async def abort(self, session_id: str | None = None) -> None:
        for sequence in self._unfinished():
            if session_id is None or sequence.request.session_id == session_id:
                sequence.stop_reason = StopReason.ABORT
        self._start_loop()

    async def pause(self) -> None:
        self._check_usable()
        if self._is_paused:
            raise EngineError("the engine is paused already; call resume() first")
        self._is_paused = True
        self._add_hold()
        try:
            await self._between_steps.wait()
        except asyncio.CancelledError:
            if self._is_paused:  # not resumed meanwhile
                await self.resume()
            raise

    async def resume(self) -> None:
        if not self._is_paused:
            raise EngineError("the engine is not paused")
        self._is_paused = False
        self._release_hold()

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        if self._has_weights:
            self._check_usable()
        else:
            self._check_ready()
        n_unfinished = len(self._unfinished())
        if n_unfinished and not self._is_paused:
            raise EngineError(
                f"weights changed to version {plan.version} while {n_unfinished} sequences were being generated; "
                "call pause() first, or wait for generate() to return"
            )
        async with self._hold():  # even without unfinished sequences: a cancelled one may still be in a step
            receipt = await self._load_weights(plan)
            self._weight_version = plan.version
        return receipt

    async def sleep(self) -> None:
        if self._is_asleep and not self._has_weights:
            return
        await self.wake_up()  # backends cannot release the weights alone
        self._check_ready()
        if n_unfinished := len(self._unfinished()):
            raise EngineError(f"the engine cannot sleep while {n_unfinished} sequences are being generated")
        self._is_asleep, self._has_weights = True, False
        async with self._hold():
            await self._release_memory()

    async def wake_up(self, what: WakeUp = "all") -> None:
        if not self._is_asleep:
            return
        self._check_usable()
        if not self._has_weights:
            await self._restore_memory("weights")
            self._has_weights = True
        if what == "all":
            await self._restore_memory("kv_cache")
            self._is_asleep = False

    async def check_health(self) -> None:
        self._check_usable()

    async def close(self) -> None:
        """Release memory and threads. A cancelled call does not interrupt it."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    # -- implemented by backends

    @abstractmethod
    async def end_session(self, session_id: str) -> None:
        """Drop a session's cache."""

    @abstractmethod
    def _new_sequence(self, request: EngineRequest, max_tokens: int) -> S:
        """Return a sequence of at most `max_tokens` with its prompt, or raise EngineError if it cannot be served."""

    @abstractmethod
    async def _step(self) -> None:
        """Take one step with the sequences of the queue, and `_append` the sampled tokens."""

    def _take_finished(self) -> list[S]:
        """Remove the sequences that are over, and return them."""
        return self._queue.take_finished()

    @abstractmethod
    async def _drop_all(self) -> None:
        """Drop all sequences and caches after a failed step."""

    @abstractmethod
    async def _load_weights(self, plan: SyncPlan) -> Receipt:
        """Load the weights of a sync, and drop all caches. Active sequences are prefilled again."""

    @abstractmethod
    async def _release_memory(self) -> None:
        """Release memory while no sequence is active."""

    async def _retry_smaller(self, error: Exception) -> Exception | None:
        """Prepare to repeat a step that ran out of memory with less of it, or return the error to fail with."""
        return error

    def _interrupt_step(self) -> None:
        """End the current step early if it is waiting for something other than its own computation."""

    async def _restore_memory(self, part: MemoryPart) -> None:
        """Undo `_release_memory`, first for the weights, then for the cache. The default allocates both on demand."""

    async def _shut_down(self) -> None:
        """Release everything, after the last step."""
        await self._release_memory()

    # -- the loop

    def _start_loop(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run())
        else:
            self._interrupt_step()

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[None]:
        """Wait for the current step to end, deliver its results, and let no step start within the context."""
        self._add_hold()
        try:
            await self._between_steps.wait()
            self._deliver_finished()
            yield
        finally:
            self._release_hold()

    def _add_hold(self) -> None:
        self._n_holds += 1
        self._interrupt_step()

    def _release_hold(self) -> None:
        self._n_holds -= 1
        self._start_loop()

    async def _run(self) -> None:
        """Take steps until no sequence is left or the engine is held."""
        self._deliver_finished()
        while not self._n_holds and (self._queue.running or self._queue.waiting):
            self._between_steps.clear()
            try:
                await self._step()
                ENGINE.progress()
            except Exception as error:  # callers get the error, and the engine continues
                failure = error if not is_out_of_memory(error) else await self._retry_smaller(error)
                if failure is error:
                    logger.exception("A generation step failed")
                if failure is not None:
                    await self._recover(failure)
            finally:
                self._between_steps.set()
            self._deliver_finished()

    def _deliver_finished(self) -> None:
        """Deliver complete results, and drop sequences whose caller has left."""
        for sequence in self._take_finished():
            assert sequence.done is not None
            if sequence.stop_reason is not None and not sequence.done.done():
                result = sequence.result()
                sequence.put_chunk(result)
                sequence.done.set_result(result)

    async def _recover(self, error: Exception) -> None:
        """Fail every waiting call, and drop everything that the failed step may have corrupted."""
        self._deliver_finished()  # aborted requests, and requests that were complete before the step failed
        is_described = isinstance(error, EngineError | OutOfMemoryError)
        self._fail_waiting(str(error) if is_described else f"generation failed: {error!r}", error)
        try:
            await self._drop_all()
        except Exception as second_error:
            logger.exception("The engine cannot continue")
            self._broken_by = second_error
            self._n_holds += 1
            self._fail_waiting(f"the engine cannot continue after {second_error!r}; create a new one", second_error)

    async def _close(self) -> None:
        self._add_hold()
        self._fail_waiting("the engine was closed while requests were waiting")
        try:
            await self._between_steps.wait()
            if self._loop_task is not None:
                await asyncio.wait([self._loop_task])
            self._deliver_finished()
            await self._shut_down()
        finally:
            self._thread.close()

    def _append(self, sequence: S, choice: SampledToken) -> None:
        """Add a sampled token to its sequence, unless the sequence ended while the step ran."""
        if sequence.is_over:
            return
        if not math.isfinite(choice.logprob):
            raise EngineError(
                f"the model's logits are not finite (weight version {self._weight_version}): the policy has "
                "diverged; resume from an earlier checkpoint with a lower learning rate"
            )
        sequence.append(choice, self._weight_version)
        sequence.stop_reason = find_stop_reason(sequence, self._eos_ids, self._tokenizer)
        if sequence.stop_reason is None:
            sequence.put_chunk()

    # -- requests

    def _admit(self, request: EngineRequest) -> S:
        if request.images and not self.info.reads_images:
            raise EngineError(f"a request has images, but {self._image_fault}")
        n_prompt = len(request.prompt_ids)
        if not 0 < n_prompt < self.info.context_length:
            raise EngineError(
                f"a prompt of {n_prompt} tokens: this model takes between 1 and {self.info.context_length - 1}; lower "
                "generator.max_input_length or shorten the prompt"
            )
        lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
        if lowest < 0 or highest >= self._facts.vocab_size:
            raise EngineError(
                f"a prompt with token {lowest if lowest < 0 else highest}: valid tokens are 0 to "
                f"{self._facts.vocab_size - 1}; use the tokenizer of its folder"
            )
        if unknown := [i for i in request.sampling.stop_token_ids if not 0 <= i < self._facts.vocab_size]:
            raise EngineError(f"stop_token_ids={unknown}: valid tokens are 0 to {self._facts.vocab_size - 1}")
        return self._new_sequence(request, min(n_prompt + request.sampling.max_new_tokens, self.info.context_length))

    def _check_usable(self) -> None:
        if self._closing is not None:
            raise EngineError("the engine is closed; create a new one")
        if self._broken_by is not None:
            raise EngineLostError(
                f"the engine cannot continue after {self._broken_by!r}; create a new one"
            ) from self._broken_by

    def _check_ready(self) -> None:
        self._check_usable()
        if self._is_asleep:
            raise EngineError("the engine is asleep; call wake_up() first")

    def _unfinished(self) -> list[S]:
        return [sequence for sequence in self._queue if not sequence.is_over]

    def _fail_waiting(self, message: str, cause: Exception | None = None) -> None:
        """Fail every waiting request, each with its own error object."""
        for sequence in self._unfinished():
            assert sequence.done is not None
            if isinstance(cause, OutOfMemoryError):
                sequence.done.set_exception(OutOfMemoryError(message, cause.stage))
                continue
            error = EngineLostError(message) if isinstance(cause, EngineLostError) else EngineError(message)
            error.__cause__ = cause
            sequence.done.set_exception(error)
