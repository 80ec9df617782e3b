"""The engine's loop: a little of everything there is to do, in turns, so that nobody waits for somebody else's work."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sqlalchemy import Engine as Database

from tx.tinker.backends.base import Backend
from tx.tinker.config import TxConfig
from tx.tinker.database import writing
from tx.tinker.db_models import EngineState, Kind, Request, now
from tx.tinker.doorbell import Doorbell
from tx.tinker.engine.handlers import Handlers
from tx.tinker.engine.queue import Outcome, Queue
from tx.tinker.engine.restore import RestorePoints
from tx.tinker.engine.samplers import Samplers
from tx.tinker.types import PassResult, SampleResult, UserError
from tx.tinker.wire import codec
from tx.tinker.wire.sample_job import SampleJob

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
STATE_SECONDS = 1.0
QUIET_SECONDS = 5.0  # after a step that nothing follows, before its restore point is written
MOST_IN_BACKEND = 256  # sample requests that the backend knows of


@dataclass(slots=True, eq=False)
class _Passes:
    """Passes that are computed together, of different models."""

    requests: list[Request]
    results: Iterator[tuple[int, PassResult | Exception] | None]


@dataclass(slots=True)
class Counts:
    """What was done, for the status page."""

    requests: Counter[str] = field(default_factory=Counter)
    n_tokens_trained: int = 0
    n_tokens_sampled: int = 0


class Engine:
    """All of it. One thread."""

    def __init__(self, config: TxConfig, database: Database, backend: Backend, doorbell: Doorbell) -> None:
        self._config = config
        self._database = database
        self._backend = backend
        self._doorbell = doorbell
        self._queue = Queue(database)
        self._points = RestorePoints(config, database, backend)
        self._samplers = Samplers(config, backend)
        self._handlers = Handlers(config, database, backend, self._points, self._samplers)
        self._passes: deque[_Passes] = deque()
        self._busy: set[str] = set()
        self._sampling: dict[int, Callable[[], None]] = {}  # what cancels each
        self._outcomes: list[Outcome] = []
        self._stepped: dict[str, tuple[int, float]] = {}  # models without gradients: their last step, and when
        self._counts = Counts()
        self._state_at = 0.0

    def run(self, should_end: Callable[[], bool]) -> None:
        """Bring back what was there, and work until told to end, or the server is gone."""
        self._points.restore()
        logger.info("the engine serves %s", self._backend.base_model.name)
        is_called = True
        while not should_end() and not self._doorbell.is_hung_up:
            if is_called and self._queue.fetch():
                self._drop_cancelled()
            has_worked = self.work()
            if not has_worked:
                self._write_points()
            self._tell_state()
            is_called = self._doorbell.wait(0.0 if has_worked else IDLE_SECONDS) or not has_worked

    def work(self) -> bool:
        """A turn for each kind of work; whether there was any."""
        has_worked = self._handle_heads()
        has_worked |= self._compute()
        has_worked |= self._sample()
        if self._outcomes:
            outcomes, self._outcomes = self._outcomes, []
            self._queue.finish(outcomes)
            self._doorbell.ring()
        return has_worked

    # -- models

    def _handle_heads(self) -> bool:
        """Whatever is next of each model; passes that are next at the same time are computed together."""
        heads = self._queue.heads(self._busy)
        passes = [head for head in heads if head.kind == Kind.FORWARD_BACKWARD]
        for head in heads:
            self._queue.pop(head)
            self._counts.requests[head.kind] += 1
            if head.kind != Kind.FORWARD_BACKWARD:
                self._finish_at_once(head)
        if passes:
            self._begin(passes)
        return bool(heads)

    def _finish_at_once(self, request: Request) -> None:
        """A request of a model that takes one turn. Its outcome is written before the model goes on."""
        outcome = self._handlers.handle(request)
        self._queue.finish([outcome])
        self._doorbell.ring()
        model_id = request.model_id
        if model_id is None or outcome.error is not None:
            return
        if request.kind == Kind.UNLOAD_MODEL:
            self._stepped.pop(model_id, None)
        if request.kind == Kind.OPTIM_STEP:
            self._stepped[model_id] = outcome.request_id, time.monotonic()
            if self._points.is_due(model_id):
                self._write_point(model_id)

    def _write_points(self) -> None:
        """Of models that have been quiet since their last step."""
        for model_id, (_, stepped_at) in list(self._stepped.items()):
            if time.monotonic() - stepped_at > QUIET_SECONDS:
                self._write_point(model_id)

    def _write_point(self, model_id: str) -> None:
        request_id, _ = self._stepped.pop(model_id)
        self._points.write(model_id, request_id)

    def _begin(self, requests: list[Request]) -> None:
        asked, begun = [], []
        for request in requests:
            try:
                asked.append(codec.pass_of(codec.message_from_bytes(request.payload)))
                begun.append(request)
            except UserError as error:
                self._outcomes.append(Outcome(request.request_id or 0, error=error))
        for request, one in zip(begun, asked, strict=True):
            self._busy.add(request.model_id or "")
            if not one.is_forward_only:
                self._stepped.pop(request.model_id or "", None)
        if begun:
            self._passes.append(_Passes(begun, self._backend.passes(asked)))

    def _compute(self) -> bool:
        """A micro-batch of the passes whose turn it is."""
        if not self._passes:
            return False
        passes = self._passes.popleft()
        found = next(passes.results, StopIteration)
        if found is StopIteration:
            return True
        self._passes.append(passes)
        if found is not None:
            number, result = found  # type: ignore[misc]
            self._note_pass(passes.requests[number], result)
        return True

    def _note_pass(self, request: Request, result: PassResult | Exception) -> None:
        assert request.request_id is not None
        if isinstance(result, Exception):
            self._outcomes.append(Outcome(request.request_id, error=result))
        else:
            self._counts.n_tokens_trained += sum(len(one) for one in result.logprobs)
            self._outcomes.append(Outcome(request.request_id, codec.forward_backward_bytes(result), is_protobuf=True))
        self._busy.discard(request.model_id or "")

    # -- samples

    def _sample(self) -> bool:
        """Let samples begin, the sessions in turns, and choose a few tokens."""
        while len(self._sampling) < MOST_IN_BACKEND and (request := self._queue.next_sample()) is not None:
            self._begin_sample(request)
        return self._backend.step()

    def _begin_sample(self, request: Request) -> None:
        request_id = request.request_id
        assert request_id is not None
        self._counts.requests[request.kind] += 1
        base = self._backend.base_model

        def done(result: SampleResult | Exception) -> None:
            self._sampling.pop(request_id, None)
            if isinstance(result, Exception):
                self._outcomes.append(Outcome(request_id, error=result))
                return
            self._counts.n_tokens_sampled += sum(len(one.tokens) for one in result.samples)
            self._outcomes.append(Outcome(request_id, codec.sample_bytes(result), is_protobuf=True))

        try:
            job = SampleJob.model_validate_json(request.payload)
            asked = job.request(eos_ids=base.eos_ids, max_context=base.max_context)
            self._sampling[request_id] = self._backend.sample(asked, self._samplers.find(job.weights), done)
        except Exception as error:
            if not isinstance(error, UserError):
                logger.exception("sample request %d failed", request_id)
            self._outcomes.append(Outcome(request_id, error=error))

    def _drop_cancelled(self) -> None:
        for request_id in self._queue.cancelled & self._sampling.keys():
            self._sampling.pop(request_id)()

    # -- state

    def _tell_state(self) -> None:
        """For the server: that the engine is there, and what it does."""
        if time.monotonic() - self._state_at < STATE_SECONDS:
            return
        self._state_at = time.monotonic()
        base = self._backend.base_model
        state = EngineState(
            base_model=base.name,
            tokenizer_id=str(base.folder),
            vocab_size=base.vocab_size,
            max_context=base.max_context,
            eos_ids=list(base.eos_ids),
            can_train_all=base.can_train_all,
            has_tokenizer=(base.folder / "tokenizer.json").is_file(),
            last_seen_at=now(),
            status={
                "pid": os.getpid(),
                "requests": dict(self._counts.requests),
                "tokens_trained": self._counts.n_tokens_trained,
                "tokens_sampled": self._counts.n_tokens_sampled,
                "models": sorted(self._backend.models()),
                "sampling": len(self._sampling),
            },
        )
        with writing(self._database) as session:
            session.merge(state)
