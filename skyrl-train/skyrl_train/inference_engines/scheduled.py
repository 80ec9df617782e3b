"""Base classes for engines whose backend schedules requests itself."""

import asyncio
import math
from abc import abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from skyrl_train.errors import EngineError, SamplingError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.sampling import SampledToken
from skyrl_train.inference_engines.sequence import ActiveSequence
from skyrl_train.inference_engines.stepped import EngineFacts, EngineThread, SteppedEngine

RESHAPING = ("top_p", "top_k", "min_p", "min_new_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty")
GAVE_UP = "the backend gave up on a request; see its output above"


class Output(NamedTuple):
    """New tokens of one request."""

    request_id: str
    choices: list[SampledToken]
    n_reused: int | None = None  # prompt tokens taken from the cache, if the backend reports them with this output
    is_over: bool = False  # no more outputs will follow
    error: str | None = None  # why the backend gave up on this request


class SamplingLimits(NamedTuple):
    """Sampling that a backend accepts, because it reports only log-probs of the distribution that it samples from.

    With truncation or penalties, those are not the policy's.
    """

    backend: str  # its name in error messages
    alternative: str  # what to do instead, for error messages
    temperatures: tuple[float, float] = (0.0, math.inf)  # limits for samples that are not greedy

    def check(self, sampling: SamplingParams) -> None:
        """Raise SamplingError if the backend cannot sample like this, or not with the policy's log-probs."""
        low, high = self.temperatures
        if sampling.temperature and not low <= sampling.temperature <= high:
            raise SamplingError(
                f"temperature={sampling.temperature}: {self.backend} accepts 0, and {low:g} to {high:g}; change it, or "
                f"{self.alternative}"
            )
        for name in RESHAPING:
            if (value := getattr(sampling, name)) != getattr(SamplingParams(1), name):
                raise SamplingError(
                    f"{name}={value}: {self.backend} does not report the policy's log-probs of tokens that it samples "
                    f"with it; remove it, or {self.alternative}"
                )


class ScheduledEngine(SteppedEngine[ActiveSequence]):
    """An engine whose backend decides which requests run.

    Sessions need no separate cache, because the backend indexes cached keys and values by tokens and evicts them when
    it needs the space.
    """

    _limits: SamplingLimits | None = None
    """Checked for each request. None if the backend reports the policy's log-probs for all sampling."""

    def __init__(self, facts: EngineFacts, tokenizer: PreTrainedTokenizerBase, thread: EngineThread) -> None:
        super().__init__(facts, tokenizer, thread)
        self._n_submitted = 0  # so far
        self._by_id: dict[str, ActiveSequence] = {}  # the running sequences

    @abstractmethod
    async def _exchange(self, new: Mapping[str, ActiveSequence]) -> list[Output]:
        """Submit new requests to the backend and return its next outputs.

        An interrupted request resumes after the tokens that it has generated.
        """

    @abstractmethod
    def _abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests in the backend."""

    async def end_session(self, session_id: str) -> None:
        """Do nothing. Other sequences may use the session's cached tokens, and the backend evicts unused ones."""

    def _new_sequence(self, request: EngineRequest, max_tokens: int) -> ActiveSequence:
        if self._limits is not None:
            self._limits.check(request.sampling)
        return ActiveSequence(request, max_tokens)

    def _take_finished(self) -> list[ActiveSequence]:
        if over := [request_id for request_id, sequence in self._by_id.items() if sequence.is_over]:
            self._abort(over)
            for request_id in over:
                del self._by_id[request_id]
        return super()._take_finished()

    async def _step(self) -> None:
        new = {str(self._n_submitted + i): sequence for i, sequence in enumerate(self._queue.waiting)}
        self._n_submitted += len(new)
        for waiting in new.values():
            waiting.n_received = 0
        self._by_id |= new
        self._queue.running += new.values()
        self._queue.waiting.clear()
        for output in await self._exchange(new):
            sequence = self._by_id.get(output.request_id)
            if sequence is None:
                continue
            if sequence.n_reused is None:
                sequence.n_reused = output.n_reused
            for choice in output.choices:
                self._append(sequence, choice)
            if output.is_over and not sequence.is_over:
                assert sequence.done is not None
                sequence.done.set_exception(EngineError(output.error or GAVE_UP))

    async def _drop_all(self) -> None:
        self._abort(list(self._by_id))
        self._by_id.clear()
        self._queue.clear()


class AsyncEngine(ScheduledEngine):
    """An engine whose backend is another process. The backend takes its own steps and streams its outputs.

    While the engine is held, running requests are aborted in the backend. They are submitted again afterwards, with the
    tokens that they have generated. If the backend derives each sample from the seed and the position, the tokens do
    not change.
    """

    def __init__(self, facts: EngineFacts, tokenizer: PreTrainedTokenizerBase, thread: EngineThread) -> None:
        super().__init__(facts, tokenizer, thread)
        self._outputs: asyncio.Queue[Output | Exception | None] = asyncio.Queue()
        """Outputs of the backend. None ends a step, and an exception fails it."""
        self._aborts: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def _submit_to_backend(self, new: Mapping[str, ActiveSequence]) -> None:
        """Submit new requests to the backend, whose outputs the subclass puts into `_outputs`."""

    def _start_abort(self, abort: Coroutine[Any, Any, None]) -> None:
        """Send a request to abort to the backend, without waiting for its answer."""
        task = asyncio.create_task(abort)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _wait_for_aborts(self) -> None:
        """Wait until the backend has received all requests to abort."""
        if self._aborts:
            await asyncio.wait(self._aborts)

    def _interrupt_step(self) -> None:
        self._outputs.put_nowait(None)

    async def _exchange(self, new: Mapping[str, ActiveSequence]) -> list[Output]:
        await self._submit_to_backend(new)
        received = [await self._outputs.get()]
        while not self._outputs.empty():
            received.append(self._outputs.get_nowait())
        for item in received:
            if isinstance(item, Exception):
                raise item
        return [output for output in received if isinstance(output, Output)]

    async def _step(self) -> None:
        await super()._step()
        if self._n_holds:
            self._abort(list(self._by_id))
            self._by_id.clear()
            self._queue.restart_all()
