"""The engine's loop: it interleaves all work in small slices, so that no request blocks all other work."""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

from sqlalchemy import Engine as Database
from sqlalchemy import update
from sqlmodel import col

from tx.tinker.backends.base import Backend
from tx.tinker.config import TxConfig
from tx.tinker.db_models import STALLED, EngineState, Kind, TxRequest, now
from tx.tinker.doorbell import Doorbell
from tx.tinker.engine.handlers import Handlers
from tx.tinker.engine.passes import Passes, failed_outcome
from tx.tinker.engine.queue import PendingRequest, Queue, RequestOutcome, give_up
from tx.tinker.engine.restore import RestorePoints
from tx.tinker.engine.samplers import Samplers
from tx.tinker.engine.sampling import Sampling
from tx.tinker.store.checkpoint_files import restore_replaced
from tx.tinker.store.database import writing

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
WRITING_SECONDS = 0.005
STATE_SECONDS = 1.0
POINT_DELAY_SECONDS = 5.0  # idle time after a step before its restore point is written


def report_alive(database: Database, base_model: str, **columns: object) -> None:
    """Report that a base model's engine is alive, whatever its loop is doing, and change other columns."""
    values = {"last_seen_at": now(), **columns}
    with writing(database) as session:
        session.exec(update(EngineState).where(col(EngineState.base_model) == base_model).values(values))


class Engine:
    """The engine. It computes in one thread, and writes files in another.

    One turn of `work` begins requests, computes one slice of one pass, samples a few tokens for every running sample,
    and writes the outcomes. A forward-backward of 100 micro-batches therefore takes 100 turns, and a sample that
    arrives in the middle starts after one micro-batch instead of 100. Requests of one model never overlap: the next one
    starts when the previous outcome is in the database. So a model changes in the order of its client's requests,
    whatever other models do in between.

    A crash loses no accepted request. A request counts as unfinished until its outcome is committed, and `restore`
    repeats the finished passes and steps of each model. If the same request is running each time the engine dies, it
    becomes a suspect: it runs alone and is eventually failed, so that one bad request cannot block all users.
    """

    def __init__(self, config: TxConfig, database: Database, backend: Backend, doorbell: Doorbell) -> None:
        self._config = config
        self._database = database
        self._backend = backend
        self._doorbell = doorbell
        kinds = [kind for kind in Kind if kind is not Kind.SAMPLE or config.external_inference_url is None]
        self._queue = Queue(database, backend.base_model.name, kinds)
        self._points = RestorePoints(config, database, backend)
        self._samplers = Samplers(config, backend)
        self._handlers = Handlers(config, database, backend, self._points, self._samplers)
        base = backend.base_model
        self._state = EngineState(
            base_model=base.name,
            vocab_size=base.vocab_size,
            max_context=base.max_context,
            eos_ids=list(base.eos_ids),
            can_train_all=base.can_train_all,
            has_tokenizer=(base.folder / "tokenizer.json").is_file(),
        )
        self._passes = Passes(backend, self._state, lambda model_id: self._stepped.pop(model_id, None))
        self._sampling = Sampling(backend, self._samplers, self._state)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._saves: dict[str, tuple[TxRequest, Future[RequestOutcome]]] = {}  # by model, which waits for its save
        self._outcomes: list[RequestOutcome] = []
        self._stepped: dict[str, tuple[int, float]] = {}  # models without gradients: their last step and its time
        self._alone: int | None = None  # the running suspect: nothing else begins until it ends
        self._counts: Counter[str] = Counter()  # requests by kind
        self._state_at = 0.0
        self._progress_at = time.monotonic()
        self._is_serving = False

    def run(self, should_end: Callable[[], bool]) -> None:
        """Restore the models, then serve."""
        restore_replaced(self._config.checkpoints_base)
        self._points.restore()
        self._is_serving = True
        logger.info("the engine serves %s", self._backend.base_model.name)
        self.serve(should_end)

    def serve(self, should_end: Callable[[], bool]) -> None:
        """Serve until `should_end` returns True or the server is gone."""
        was_rung = True
        while not should_end() and not self._doorbell.is_hung_up:
            self._progress_at = time.monotonic()
            if was_rung:
                self._queue.fetch()
            has_worked = self.work()
            if not has_worked:
                self._write_points()
            self._report()
            idle = 0.0 if has_worked else WRITING_SECONDS if self._saves else IDLE_SECONDS
            was_rung = self._doorbell.wait(idle) or idle == IDLE_SECONDS
        futures.wait(outcome for _, outcome in self._saves.values())
        self._collect_saves()
        self._points.wait()
        self._queue.release_running()

    def close(self) -> None:
        """Stop the thread that writes."""
        self._writer.shutdown()

    def prepare_stop(self) -> None:
        """Release running requests, since a kill may cut them short. Any thread may call this."""
        self._queue.prepare_stop()

    def beat(self) -> None:
        """Report that the engine is alive while the loop is in a long computation. Any thread may call this.

        Compiling counts as progress, as does restoring models before the loop starts.
        """
        now_at = time.monotonic()
        if self._backend.is_compiling or not self._is_serving:
            self._progress_at = now_at
        if now_at - self._state_at > 2 * STATE_SECONDS:
            status = {**self._state.status, STALLED: round(now_at - self._progress_at)}
            report_alive(self._database, self._state.base_model, status=status)

    def work(self) -> bool:
        """Do one slice of each kind of work. Return True if there was any."""
        for request_id in self._queue.find_cancelled():
            if self._sampling.cancel(request_id):
                self._queue.drop(request_id)
        has_worked = self._begin()
        if self._passes:
            has_worked = True
            computed = self._passes.step()
            self._outcomes += [] if computed is None else [computed]
        has_worked |= self._sampling.step()
        has_worked |= self._collect_saves()
        self._outcomes += self._sampling.take_outcomes()
        if self._outcomes:
            outcomes, self._outcomes = self._outcomes, []
            self._finish(outcomes)
        return has_worked

    def _finish(self, outcomes: Sequence[RequestOutcome]) -> None:
        self._queue.finish(outcomes)
        self._doorbell.ring()

    # -- begin

    def _begin(self) -> bool:
        """Begin each model's next request, and samples. If there is a suspect, begin it alone."""
        if self._alone in self._queue.begun:
            return False
        busy = self._passes.busy | self._saves.keys()
        suspect = self._queue.next_suspect(busy)
        if suspect is not None:
            return self._begin_suspect(suspect)
        heads = self._queue.heads(busy)
        samples = self._queue.next_samples(self._sampling.n_free, self._sampling.running_by_owner)
        for request in (*self._queue.begin(heads), *self._queue.begin(samples)):
            self._start(request)
        return bool(heads or samples)  # True even if all were cancelled: there may be more

    def _begin_suspect(self, suspect: PendingRequest) -> bool:
        if self._passes or self._sampling or self._saves:
            return False  # wait until they are done
        requests = self._queue.begin([suspect])
        self._alone = suspect.request_id
        outcome = give_up(suspect)
        if outcome is not None and suspect.kind == Kind.OPTIM_STEP:
            self._backend.drop_gradients(suspect.model_id or "")
        for request in requests:
            if outcome is None:
                logger.warning(
                    "request %d runs alone: %d engines died while it was running", suspect.request_id, suspect.n_tries
                )
                self._start(request)
            else:
                self._outcomes.append(outcome)
        return True

    def _start(self, request: TxRequest) -> None:
        self._counts[request.kind] += 1
        if request.kind == Kind.SAMPLE:
            self._sampling.begin(request)
        elif request.kind == Kind.FORWARD_BACKWARD:
            refused = self._passes.begin(request)
            if refused is not None:
                self._outcomes.append(refused)
        elif isinstance(handled := self._handlers.handle(request), RequestOutcome):
            self._complete(request, handled)  # before the model continues
        else:
            self._saves[request.model_id or ""] = request, self._writer.submit(handled)

    def _collect_saves(self) -> bool:
        """Complete the saves whose files are written. Return True if there were any."""
        written = [model_id for model_id, (_, outcome) in self._saves.items() if outcome.done()]
        for model_id in written:
            request, outcome = self._saves.pop(model_id)
            self._complete(request, outcome.result())
        return bool(written)

    def _complete(self, request: TxRequest, outcome: RequestOutcome) -> None:
        try:
            self._finish([outcome])
        except OSError as error:  # e.g. a folder could not be renamed
            outcome = failed_outcome(request, error)
            self._finish([outcome])
        model_id = request.model_id
        if model_id is None or outcome.error is not None:
            return
        if request.kind == Kind.UNLOAD_MODEL:
            self._stepped.pop(model_id, None)
        if request.kind == Kind.OPTIM_STEP:
            self._stepped[model_id] = outcome.request_id, time.monotonic()
            if self._points.is_due(model_id):
                self._write_point(model_id)

    # -- report

    def _write_points(self) -> None:
        """Write restore points of models that have been idle since their last step."""
        for model_id, (_, stepped_at) in list(self._stepped.items()):
            if time.monotonic() - stepped_at > POINT_DELAY_SECONDS:
                self._write_point(model_id)

    def _write_point(self, model_id: str) -> None:
        if not self._points.is_writing(model_id):
            request_id, _ = self._stepped.pop(model_id)
            self._points.begin_write(model_id, request_id, self._writer)

    def _report(self) -> None:
        """Report the engine's status every second, and evict deleted weights."""
        if time.monotonic() - self._state_at < STATE_SECONDS:
            return
        self._state_at = time.monotonic()
        self._samplers.evict_deleted()
        self._state.last_seen_at = now()
        self._state.status = {  # for the status page
            "pid": os.getpid(),
            "requests": dict(self._counts),
            "tokens_trained": self._passes.n_tokens,
            "tokens_sampled": self._sampling.n_tokens,
            "models": sorted(self._backend.models()),
            STALLED: 0,
            "training": len(self._passes),
            "sampling": len(self._sampling),
            **self._backend.counts(),
        }
        with writing(self._database) as session:
            session.merge(self._state)
