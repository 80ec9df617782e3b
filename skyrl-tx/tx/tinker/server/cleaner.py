"""Clean up: end stale sessions, delete expired checkpoints and old results."""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Generic, TypeVar

from sqlmodel import Session

from tx.tinker.db_models import ClientSession, SessionStatus
from tx.tinker.server.service import Service, run_forever
from tx.tinker.store import queries, retention
from tx.tinker.store.checkpoint_files import (
    ABANDONED_SEC,
    SNAPSHOTS,
    delete_aside,
    delete_folder,
    leftovers,
    snapshots_folder,
    write_times,
)

logger = logging.getLogger(__name__)

K = TypeVar("K")


class Ages(Generic[K]):
    """Seconds since values last changed, by a monotonic clock, since the wall clock may jump by hours.

    A value counts as new when it is first seen, so that nothing expires while no server runs.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changes: dict[K, tuple[object, float]] = {}

    def find_older(self, values: Mapping[K, object], seconds: float) -> list[K]:
        """Return the keys whose values have not changed for `seconds`. Forget keys that are no longer present."""
        now = self._clock()
        known = self._changes
        self._changes = {
            key: known[key] if key in known and known[key][0] == value else (value, now)
            for key, value in values.items()
        }
        return [key for key, (_, changed_at) in self._changes.items() if now - changed_at > seconds]


class Cleaner:
    """A background task that cleans up every `session_cleanup_interval_sec`."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._session_ages: Ages[str] = Ages(clock)
        self._snapshot_ages: Ages[Path] = Ages(clock)
        self._leftover_ages: Ages[Path] = Ages(clock)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the task within the block."""
        task = asyncio.create_task(run_forever(self._run))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._service.config.session_cleanup_interval_sec)
            await self.clean()

    async def clean(self) -> None:
        """Clean up once."""
        service = self._service
        config = service.config
        if config.session_timeout_sec >= 0:
            await self._end_stale_sessions(config.session_timeout_sec)
        await self._delete_snapshots()
        await service.compute(self._delete_leftovers)

        def drop_expired(db: Session) -> list[tuple[str, Path | None]]:
            expired = retention.expired_checkpoints(db)
            return [(checkpoint.path, queries.drop_checkpoint(db, checkpoint, config)) for checkpoint in expired]

        for path, aside in await service.write(drop_expired):
            await service.compute(partial(delete_aside, aside))
            logger.info("deleted checkpoint %s: it has expired", path)
        delete_batches: tuple[Callable[[Session], int], ...] = (
            partial(retention.delete_requests, retention=config.retention_sec),
            partial(retention.clear_results, retention=config.retention_sec),
            retention.clear_payloads,
        )
        for delete_batch in delete_batches:
            while await service.write(delete_batch):
                pass  # release the database between batches

    async def _end_stale_sessions(self, timeout: float) -> None:
        seen = await self._service.read(retention.active_sessions)
        stale = {session_id: seen[session_id] for session_id in self._session_ages.find_older(seen, timeout)}
        if not stale:
            return
        for session_id in await self._service.write(partial(_end_unseen, seen=stale)):
            logger.info("ended session %s: no request for %g s", session_id, timeout)
        self._service.wake()
        self._service.promises.wake()

    async def _delete_snapshots(self) -> None:
        """Delete unused snapshots, and snapshots of ended sessions: the engine may have just written one."""
        service = self._service
        base = service.config.checkpoints_base / SNAPSHOTS
        await service.compute(partial(self._delete_unused, base))
        session_ids = await service.compute(lambda: [folder.name for folder in base.glob("[!.]*")])
        for session_id in await service.read(partial(retention.ended_sessions, session_ids=session_ids)):
            await service.compute(partial(delete_folder, snapshots_folder(service.config, session_id)))
            logger.info("deleted the snapshots of session %s: it has ended", session_id)

    def _delete_unused(self, base: Path) -> None:
        config = self._service.config
        used = write_times(base.glob("[!.]*/[!.]*"))  # sampling touches the folder
        for folder in self._snapshot_ages.find_older(used, config.snapshot_retention_sec):
            del used[folder]
            delete_folder(folder)
            logger.info("deleted snapshot %s: unused for %g s", folder, config.snapshot_retention_sec)
        limit = config.max_snapshots_per_session
        for _, of_session in groupby(sorted(used), key=lambda folder: folder.parent):
            for folder in sorted(of_session, key=lambda folder: used[folder])[:-limit]:  # least recently used first
                delete_folder(folder)
                logger.info("deleted snapshot %s: its session has %d that were used later", folder, limit)

    def _delete_leftovers(self) -> None:
        times = write_times(leftovers(self._service.config.checkpoints_base))
        for folder in self._leftover_ages.find_older(times, ABANDONED_SEC):
            shutil.rmtree(folder, ignore_errors=True)


def _end_unseen(db: Session, seen: Mapping[str, object]) -> list[str]:
    """End the sessions that were not seen again, and return them."""
    sessions = [db.get_one(ClientSession, session_id) for session_id in seen]
    stale = [
        session
        for session in sessions
        if session.status is SessionStatus.ACTIVE and session.last_seen_at == seen[session.session_id]
    ]
    for session in stale:
        queries.end_session(db, session, SessionStatus.EXPIRED, "timed out")
    return [session.session_id for session in stale]
