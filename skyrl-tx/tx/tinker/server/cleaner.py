"""Clean up: end stale sessions, delete expired checkpoints and old results."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from sqlmodel import Session

from tx.tinker.config import TxConfig
from tx.tinker.db_models import SessionStatus
from tx.tinker.server.service import Service, run_forever
from tx.tinker.store import queries, retention
from tx.tinker.store.checkpoint_files import (
    SNAPSHOTS,
    delete_aside,
    delete_folder,
    delete_leftovers,
    seconds_untouched,
    snapshots_folder,
)

logger = logging.getLogger(__name__)


class Cleaner:
    """A background task that cleans up every `session_cleanup_interval_sec`."""

    def __init__(self, service: Service) -> None:
        self._service = service

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
        config = self._service.config
        if config.session_timeout_sec >= 0:
            for session_id in await self._service.write(partial(_end_stale, timeout=config.session_timeout_sec)):
                logger.info("ended session %s: no request for %g s", session_id, config.session_timeout_sec)
            self._service.ring()
            self._service.promises.ring()
        await self._delete_snapshots()
        await self._service.compute(partial(delete_leftovers, config.checkpoints_base))
        for path, aside in await self._service.write(partial(_drop_expired, config=config)):
            await self._service.compute(partial(delete_aside, aside))
            logger.info("deleted checkpoint %s: it has expired", path)
        for delete_batch in (retention.delete_requests, retention.delete_results):
            while await self._service.write(partial(delete_batch, retention=config.retention_sec)):
                pass  # release the database between batches

    async def _delete_snapshots(self) -> None:
        """Delete the snapshots of ended sessions, since the engine may have written one at that moment, and unused
        snapshots.
        """
        config = self._service.config
        base = config.checkpoints_base / SNAPSHOTS
        await self._service.compute(partial(_delete_unused, base, config.retention_sec))
        session_ids = await self._service.compute(lambda: [folder.name for folder in base.glob("[!.]*")])
        for session_id in await self._service.read(partial(retention.ended_sessions, session_ids=session_ids)):
            await self._service.compute(partial(delete_folder, snapshots_folder(config, session_id)))
            logger.info("deleted the snapshots of session %s: it has ended", session_id)


def _delete_unused(base: Path, seconds: float) -> None:
    for folder in base.glob("[!.]*/[!.]*"):
        if seconds_untouched(folder) > seconds:  # sampling touches the folder
            delete_folder(folder)
            logger.info("deleted snapshot %s: unused for %g s", folder, seconds)


def _end_stale(db: Session, timeout: float) -> list[str]:
    stale = retention.stale_sessions(db, timeout)
    for session in stale:
        queries.end_session(db, session, SessionStatus.EXPIRED, "timed out")
    return [session.session_id for session in stale]


def _drop_expired(db: Session, config: TxConfig) -> list[tuple[str, Path | None]]:
    return [(one.path, queries.drop_checkpoint(db, one, config)) for one in retention.expired_checkpoints(db)]
