"""What the routes of one server share: settings, the database, who waits, the engine, and the numbers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from sqlmodel import Session

from tx.tinker import store
from tx.tinker.admission import Admission
from tx.tinker.auth import owner_of
from tx.tinker.config import TxConfig
from tx.tinker.database import open_database, reading, writing
from tx.tinker.db_models import EngineState, now
from tx.tinker.doorbell import POLL_SEC
from tx.tinker.downloads import signing_key
from tx.tinker.metrics import Metrics
from tx.tinker.promises import BACKUP_SEC, Promises
from tx.tinker.submission import Submission
from tx.tinker.supervisor import Supervisor
from tx.tinker.throughput import SECONDS_BETWEEN, Throughput

logger = logging.getLogger(__name__)

T = TypeVar("T")
N_READERS = 4
AGAIN_SEC = 1.0
ENGINE_SILENT = timedelta(seconds=30)


class Service:
    """From the beginning of a server to its end: `async with service.running()`."""

    def __init__(self, config: TxConfig, supervisor: Supervisor | None = None) -> None:
        self.config = config
        self.metrics = Metrics()
        self.throughput = Throughput()
        self.url_key = signing_key(config.checkpoints_base)
        self.started_at = now()
        self.database = open_database(config.database_url)
        self.promises = Promises(lambda: self.read(store.still_pending), lambda: self.read(store.done_lately))
        self.admission = Admission(config.max_queued_requests, config.max_queued_bytes)
        self.supervisor = supervisor
        if config.start_engine and supervisor is None:
            self.supervisor = Supervisor(config, self.promises.ring)
        self._readers = ThreadPoolExecutor(N_READERS, thread_name_prefix="tx-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tx-write")  # one, so that none waits for a lock

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """With the tasks that belong to it; at the end all of them are over, and the database is closed."""
        loops = (partial(self.promises.watch, self._poll_sec), self._note_throughput)
        tasks = [asyncio.create_task(for_ever(one)) for one in loops]
        if self.supervisor is not None:
            tasks.append(asyncio.create_task(self._supervise(self.supervisor)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Finish what is being written, and let go of the database."""
        self._readers.shutdown()
        self._writer.shutdown()
        self.database.dispose()

    async def _supervise(self, supervisor: Supervisor) -> None:
        await supervisor.run()
        self.promises.release()  # it has given up: there is nothing to wait for

    async def _note_throughput(self) -> None:
        while True:
            state = await self.read(self.engine_state)
            self.throughput.note({} if state is None else state.status)
            await asyncio.sleep(SECONDS_BETWEEN)

    def engine_state(self, db: Session) -> EngineState | None:
        """What the engine last said of the base model that is served."""
        return store.engine_state(db, self.config.model_name)

    def _poll_sec(self) -> float:
        return BACKUP_SEC if self.supervisor is not None and self.supervisor.is_running else POLL_SEC

    async def read(self, ask: Callable[[Session], T]) -> T:
        """Ask the database, in another thread."""

        def in_thread() -> T:
            with reading(self.database) as db:
                return ask(db)

        return await asyncio.get_running_loop().run_in_executor(self._readers, in_thread)

    async def write(self, change: Callable[[Session], T]) -> T:
        """Change the database, in another thread; committed when this returns."""

        def in_thread() -> T:
            with writing(self.database) as db:
                return change(db)

        return await asyncio.get_running_loop().run_in_executor(self._writer, in_thread)

    async def compute(self, work: Callable[[], T]) -> T:
        """Something that takes a while, in another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def ring(self) -> None:
        """There is something for the engine."""
        if self.supervisor is not None:
            self.supervisor.ring()

    @property
    def failure(self) -> str | None:
        """Why nothing will be computed any more."""
        return None if self.supervisor is None else self.supervisor.failure


async def for_ever(work: Callable[[], Awaitable[None]]) -> None:
    """Something that the server does all the time. When it raises, that is logged, and it is begun again."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("a task of the server has failed; it is begun again in %g s", AGAIN_SEC)
        await asyncio.sleep(AGAIN_SEC)


def is_alive(state: EngineState | None) -> bool:
    """Whether the engine has told of itself lately."""
    return state is not None and now() - state.last_seen_at < ENGINE_SILENT


class Call:
    """One request of a client: the service, whose it is, and what the log will say of it."""

    def __init__(self, service: Service, owner: str, request: Request) -> None:
        self.service = service
        self.owner = owner
        self.http = request
        self._notes: dict[str, str] = request.scope.setdefault("tx.notes", {})

    def note(self, **notes: str | int | None) -> None:
        """For the log: `session`, `model`, `request`."""
        self._notes.update({key: str(value) for key, value in notes.items() if value is not None})

    async def prepare(self, ask: Callable[[Submission], T]) -> T:
        """Read what a request needs, before it is written down."""
        return await self.service.read(lambda db: ask(self._submission(db)))

    async def submit(self, accept: Callable[[Submission], T]) -> T:
        """Write down a request, and wake the engine."""
        accepted = await self.service.write(lambda db: accept(self._submission(db)))
        self.service.ring()
        return accepted

    def _submission(self, db: Session) -> Submission:
        return Submission(db, self.owner, self.service.config, self.service.admission)

    async def read(self, ask: Callable[[Session, str], T]) -> T:
        """Ask the database for this user."""
        return await self.service.read(partial(_swap, ask, self.owner))

    async def write(self, change: Callable[[Session, str], T]) -> T:
        """Change the database for this user."""
        return await self.service.write(partial(_swap, change, self.owner))


def _swap(ask: Callable[[Session, str], T], owner: str, db: Session) -> T:
    return ask(db, owner)


async def _call(request: Request) -> Call:
    service: Service = request.app.state.service
    return Call(service, owner_of(request.headers, service.config), request)


Caller = Annotated[Call, Depends(_call)]
