"""What ends by itself: sessions of clients that are gone, checkpoints whose time is over, and old results."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from sqlmodel import Session

from tx.tinker import retention, store
from tx.tinker.checkpoint_files import (
    SNAPSHOTS,
    delete_aside,
    delete_folder,
    delete_leftovers,
    seconds_untouched,
    snapshots_folder,
)
from tx.tinker.config import TxConfig
from tx.tinker.db_models import SessionStatus
from tx.tinker.service import Service, for_ever

logger = logging.getLogger(__name__)


class Cleaner:
    """Looks every `session_cleanup_interval_sec`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Meanwhile."""
        task = asyncio.create_task(for_ever(self._run))
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
        """Once."""
        config = self._service.config
        if config.session_timeout_sec >= 0:
            for session_id in await self._service.write(partial(_end_stale, timeout=config.session_timeout_sec)):
                logger.info("session %s has ended: not heard of for %g s", session_id, config.session_timeout_sec)
            self._service.ring()
            self._service.promises.ring()
        await self._delete_snapshots()
        await self._service.compute(partial(delete_leftovers, config.checkpoints_base))
        for path, aside in await self._service.write(partial(_drop_expired, config=config)):
            await self._service.compute(partial(delete_aside, aside))
            logger.info("checkpoint %s is deleted: its time was over", path)
        for forget in (retention.forget_requests, retention.forget_results):
            while await self._service.write(partial(forget, retention=config.retention_sec)):
                pass  # others write in between

    async def _delete_snapshots(self) -> None:
        """Of sessions that have ended, since an engine may have written one in the same moment; and unused ones."""
        config = self._service.config
        base = config.checkpoints_base / SNAPSHOTS
        await self._service.compute(partial(_delete_unused, base, config.retention_sec))
        there = await self._service.compute(lambda: [folder.name for folder in base.glob("[!.]*")])
        for session_id in await self._service.read(partial(retention.ended_of, session_ids=there)):
            await self._service.compute(partial(delete_folder, snapshots_folder(config, session_id)))
            logger.info("the snapshots of session %s are deleted: it has ended", session_id)


def _delete_unused(base: Path, seconds: float) -> None:
    for folder in base.glob("[!.]*/[!.]*"):
        if seconds_untouched(folder) > seconds:  # who samples touches it
            delete_folder(folder)
            logger.info("snapshot %s is deleted: it was not used for %g s", folder, seconds)


def _end_stale(db: Session, timeout: float) -> list[str]:
    stale = retention.stale_sessions(db, timeout)
    for session in stale:
        store.end_session(db, session, SessionStatus.EXPIRED, "not heard of")
    return [session.session_id for session in stale]


def _drop_expired(db: Session, config: TxConfig) -> list[tuple[str, Path | None]]:
    return [(one.path, store.drop_checkpoint(db, one, config)) for one in retention.expired_checkpoints(db)]
