"""Checkpoints that are written while training continues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.checkpoint.store import CheckpointStore
from skyrl_train.errors import CheckpointError
from skyrl_train.watchdog import CHECKPOINT, Wait


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a finished step, for `CheckpointWriter`."""

    step: int
    n_bytes: int
    copy: Callable[[Path], Awaitable[Awaitable[None]]]
    """Copies the state, and returns once training may continue. Awaiting the result writes the copy to the folder."""
    on_saved: Callable[[Path], Awaitable[None]]


class CheckpointWriter:
    """Writes one checkpoint at a time.

    A checkpoint goes through three phases, and training waits for the first two:

        waiting for the disk → copying the state → writing the copy

    Training waits for the disk at most `timeout_s` per checkpoint. Then the step is skipped with an alert, unless
    copying has started, because the state must not change while it is copied.
    """

    def __init__(self, store: CheckpointStore, timeout_s: float, alert: Callable[[str], Awaitable[None]]) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._alert = alert
        self._saving: asyncio.Task[None] | None = None
        self._remaining_s = 0.0  # seconds that training may still wait for the checkpoint in progress

    @property
    def is_saving(self) -> bool:
        """A checkpoint is being written in the background."""
        return self._saving is not None and not self._saving.done()

    async def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint, after the one in progress has finished. Raise CheckpointError if the write fails."""
        with Wait(CHECKPOINT, self._store.path, f"step {snapshot.step}"):
            await self._write(snapshot, _CopyPhase())

    async def begin(self, snapshot: Snapshot) -> None:
        """Copy the state, then write it in the background. A failed write is an alert, not an error."""
        copying = _CopyPhase()
        self._saving = asyncio.create_task(self._write_or_alert(snapshot, copying))
        self._remaining_s = self._timeout_s
        is_ready = await self._wait_within_limit(snapshot.step, self._saving, copying.started)
        if is_ready or not copying.started.cancel():  # it may have started meanwhile
            with Wait(CHECKPOINT, self._store.path, f"copy of step {snapshot.step}"):
                await asyncio.wait([self._saving, copying.ended], return_when=asyncio.FIRST_COMPLETED)
            if not copying.ended.done():
                await self.finish()

    async def finish_within_limit(self, step: int) -> bool:
        """Wait for the checkpoint in progress before `step` is saved. If it takes too long, alert and return False."""
        if self._saving is not None and not await self._wait_within_limit(step, self._saving):
            return False
        await self.finish()
        return True

    async def finish(self) -> None:
        """Wait until the checkpoint in progress is written."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            with Wait(CHECKPOINT, self._store.path, "checkpoint in progress"):
                await saving

    async def _wait_within_limit(self, step: int, *awaited: asyncio.Future[None]) -> bool:
        """Wait until one of the futures ends. After the limit, alert that `step` is not saved and return False."""
        if any(future.done() for future in awaited):
            return True
        started, could_wait = time.monotonic(), self._remaining_s > 0
        with Wait(CHECKPOINT, self._store.path, f"start of step {step}", self._remaining_s):
            done, _ = await asyncio.wait(awaited, timeout=self._remaining_s, return_when=asyncio.FIRST_COMPLETED)
        self._remaining_s = max(0.0, self._remaining_s - (time.monotonic() - started))
        if not done and could_wait:
            await self._alert(
                f"step {step} is not saved, because writing a checkpoint to {self._store.path} takes longer than "
                f"trainer.ckpt_timeout_seconds={self._timeout_s:g}. Training continues, and steps are saved again once "
                "it is written"
            )
        return bool(done)

    async def _write_or_alert(self, snapshot: Snapshot, copying: _CopyPhase) -> None:
        try:
            await self._write(snapshot, copying)
        except CheckpointError as error:
            await self._alert(f"{error}. Training continues, and the next step is saved instead")

    async def _write(self, snapshot: Snapshot, copying: _CopyPhase) -> None:
        async def fill(folder: Path) -> None:
            if copying.started.cancelled():
                raise CheckpointError(f"step {snapshot.step} is not saved, because {folder.parent} responded too late")
            copying.started.set_result(None)
            writing = await snapshot.copy(folder)
            copying.ended.set_result(None)
            await writing

        await snapshot.on_saved(await self._store.save(snapshot.step, fill, snapshot.n_bytes))


class _CopyPhase:
    """The copy of the state for a checkpoint. The state must not change between `started` and `ended`."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()  # cancelled if the copy must no longer start
        self.ended: asyncio.Future[None] = loop.create_future()
