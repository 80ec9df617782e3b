"""The state shared by all routes: settings, database, waiting clients, engine and metrics."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Annotated, TypeVar

from fastapi import Depends, Query, Request
from sqlmodel import Session

from tx.tinker.config import TxConfig
from tx.tinker.db_models import STALLED, EngineState, now
from tx.tinker.doorbell import POLL_SEC
from tx.tinker.server.auth import owner_of
from tx.tinker.server.dispatcher import SampleDispatcher
from tx.tinker.server.downloads import signing_key
from tx.tinker.server.metrics import ServerMetrics
from tx.tinker.server.promises import BACKUP_SEC, Promises
from tx.tinker.server.supervisor import Supervisor
from tx.tinker.server.throughput import RECORD_INTERVAL_SEC, Throughput
from tx.tinker.store import queries
from tx.tinker.store.database import open_database, reading, writing
from tx.tinker.submission.admission import Admission
from tx.tinker.submission.training import Submission

logger = logging.getLogger(__name__)

T = TypeVar("T")
N_READERS = N_WORKERS = 4
RESTART_SEC = 1.0
ENGINE_TIMEOUT = timedelta(seconds=30)
MIN_HANG_CHECK_SEC, HANG_CHECK_SEC = 0.5, 5.0


class Service:
    """Shared state of a server. Its background tasks run inside `async with service.running()`."""

    def __init__(self, config: TxConfig, supervisor: Supervisor | None = None) -> None:
        self.config = config
        self.metrics = ServerMetrics()
        self.throughput = Throughput()
        self.url_key = signing_key(config.checkpoints_base)
        self.started_at = now()
        self.database = open_database(config.database_url)
        with writing(self.database) as db:
            queries.name_users(db, config.users_by_key)
        self.promises = Promises(lambda: self.read(queries.pending_ids), lambda: self.read(queries.recent_ids))
        self.admission = Admission.from_config(config)
        self.supervisor = supervisor
        if config.start_engine and supervisor is None:
            self.supervisor = Supervisor(config, self.promises.wake)
        self.dispatcher: SampleDispatcher | None = None
        if config.external_inference_url is not None:
            url = config.external_inference_url
            self.dispatcher = SampleDispatcher(config, url, self.database, self._wake_from_thread)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers = ThreadPoolExecutor(N_READERS, thread_name_prefix="tx-read")
        # separate, so that polls need not wait for e.g. images to be decoded
        self._workers = ThreadPoolExecutor(N_WORKERS, thread_name_prefix="tx-compute")
        # a single thread, so that writers never wait for the database lock
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tx-write")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the background tasks within the block, then stop them and close the database."""
        loops = (partial(self.promises.watch, self._poll_sec), self._record_throughput)
        tasks = [asyncio.create_task(run_forever(loop)) for loop in loops]
        if self.supervisor is not None:
            tasks.append(asyncio.create_task(self._supervise(self.supervisor)))
            if self.config.engine_hang_sec >= 0:
                tasks.append(asyncio.create_task(run_forever(partial(self._abort_hung, self.supervisor))))
        self._loop = asyncio.get_running_loop()
        try:
            async with contextlib.nullcontext() if self.dispatcher is None else self.dispatcher.running():
                yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Finish pending writes and close the database."""
        self._workers.shutdown()
        self._readers.shutdown()
        self._writer.shutdown()
        self.database.dispose()

    async def _supervise(self, supervisor: Supervisor) -> None:
        await supervisor.run()
        self.promises.release()  # no engine will be started again

    async def _abort_hung(self, supervisor: Supervisor) -> None:
        """Abort an engine that reports no progress, or has stopped reporting."""
        limit = self.config.engine_hang_sec
        n_starts, previous_report, last_report, reported_at = -1, None, None, 0.0
        while True:
            state = await self.read(self.engine_state)
            report = None if state is None else state.last_seen_at
            if supervisor.n_starts != n_starts or not supervisor.is_running:
                n_starts, previous_report, last_report = supervisor.n_starts, report, None
            if report != last_report:
                last_report, reported_at = report, time.monotonic()
            stalled = 0 if state is None or report == previous_report else state.status.get(STALLED, 0)
            if stalled > limit:
                await supervisor.abort(f"it has made no progress for {stalled} s, --engine-hang-sec is {limit:g}")
            elif report is not None and time.monotonic() - reported_at > limit:
                await supervisor.abort(f"it has not reported for {limit:g} s, --engine-hang-sec")
            await asyncio.sleep(min(HANG_CHECK_SEC, max(MIN_HANG_CHECK_SEC, limit / 4)))

    async def _record_throughput(self) -> None:
        while True:
            state = await self.read(self.engine_state)
            self.throughput.record(self.counts(state))
            await asyncio.sleep(RECORD_INTERVAL_SEC)

    def engine_state(self, db: Session) -> EngineState | None:
        """Return the engine's last report for the served base model."""
        return queries.engine_state(db, self.config.model_name)

    def _poll_sec(self) -> float:
        return BACKUP_SEC if self.supervisor is not None and self.supervisor.is_running else POLL_SEC

    def _wake_from_thread(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.promises.wake)

    async def read(self, query: Callable[[Session], T]) -> T:
        """Run a query in a reader thread."""

        def in_thread() -> T:
            with reading(self.database) as db:
                return query(db)

        return await asyncio.get_running_loop().run_in_executor(self._readers, in_thread)

    async def write(self, change: Callable[[Session], T], *, is_durable: bool = False) -> T:
        """Run a transaction in the writer thread. Return once it is committed (to disk, if `is_durable`)."""

        def in_thread() -> T:
            with writing(self.database, is_durable=is_durable) as db:
                return change(db)

        return await asyncio.get_running_loop().run_in_executor(self._writer, in_thread)

    async def compute(self, work: Callable[[], T]) -> T:
        """Run slow work in a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def wake(self) -> None:
        """Wake the engine and the dispatcher, if any."""
        if self.supervisor is not None:
            self.supervisor.wake()
        if self.dispatcher is not None:
            self.dispatcher.wake()

    def counts(self, state: EngineState | None) -> dict[str, object]:
        """Return the counters of the engine and the dispatcher, if any."""
        counts: dict[str, object] = {} if state is None else dict(state.status)
        return counts if self.dispatcher is None else {**counts, **self.dispatcher.counts}

    @property
    def failure(self) -> str | None:
        """Reason why no engine will run again, or None."""
        return None if self.supervisor is None else self.supervisor.failure


async def run_forever(work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` forever. Log exceptions and restart it."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("a background task failed; restarting it in %g s", RESTART_SEC)
        await asyncio.sleep(RESTART_SEC)


def is_alive(state: EngineState | None) -> bool:
    """Return True if the engine has reported recently."""
    return state is not None and now() - state.last_seen_at < ENGINE_TIMEOUT


class Call:
    """One HTTP request: its service, its user and its log notes."""

    def __init__(self, service: Service, owner: str, request: Request) -> None:
        self.service = service
        self.owner = owner
        self.http = request
        self._notes: dict[str, str] = request.scope.setdefault("tx.notes", {})

    def add_notes(self, **notes: str | int | None) -> None:
        """Add notes to the log line: `session`, `model`, `request`."""
        self._notes.update({key: str(value) for key, value in notes.items() if value is not None})

    async def prepare(self, query: Callable[[Submission], T]) -> T:
        """Read the data that a request needs before it is queued."""
        return await self.service.read(lambda db: query(self._submission(db)))

    async def submit(self, accept: Callable[[Submission], T], *, is_durable: bool) -> T:
        """Queue a request and wake the engine. If durable, a power loss undoes neither it nor earlier requests."""
        accepted = await self.service.write(lambda db: accept(self._submission(db)), is_durable=is_durable)
        self.service.wake()
        return accepted

    def _submission(self, db: Session) -> Submission:
        return Submission(db, self.owner, self.service.config, self.service.admission)

    async def read(self, query: Callable[[Session, str], T]) -> T:
        """Run a query for this user."""
        return await self.service.read(lambda db: query(db, self.owner))

    async def write(self, change: Callable[[Session, str], T]) -> T:
        """Run a transaction for this user."""
        return await self.service.write(lambda db: change(db, self.owner))


async def _call(request: Request) -> Call:
    service: Service = request.app.state.service
    return Call(service, owner_of(request.headers, service.config), request)


Caller = Annotated[Call, Depends(_call)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=(1 << 31) - 1)]
"""Query parameters of paged lists."""
