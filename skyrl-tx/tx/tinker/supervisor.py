"""The engine as a child of the server: started, started again when it dies, and ended with the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from tx.tinker.config import TxConfig, arguments_of, environment_of
from tx.tinker.doorbell import UNUSABLE, Doorbell

logger = logging.getLogger(__name__)

ENGINE = (sys.executable, "-m", "tx.tinker.engine")
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Memory that a compiled program works in is mapped anew in each call: huge pages save most of the page faults."""
MOST_FAST_DEATHS = 5
LONG_LIFE_SEC = 60.0
LONGEST_PAUSE_SEC = 30.0
GRACE_SEC = 10.0
N_LAST_LINES = 30


class Supervisor:
    """One engine after the other, in the event loop of the server."""

    def __init__(
        self,
        config: TxConfig,
        on_ring: Callable[[], None],
        *,
        command: Sequence[str] = ENGINE,
        first_pause_sec: float = 1.0,
    ) -> None:
        self._config = config
        self._on_ring = on_ring
        self._command = command
        self._first_pause_sec = first_pause_sec
        self._bell: Doorbell | None = None
        self._last_lines: deque[str] = deque(maxlen=N_LAST_LINES)
        self._has_rung = False
        self._code: int | None = None
        self.n_starts = 0
        self.failure: str | None = None
        """Why there will be no engine any more."""
        self.unusable: str | None = None
        """Why already the first engine could not serve what it was told to: the server had better end."""

    @property
    def is_running(self) -> bool:
        """Whether there is an engine, which may still be loading the model."""
        return self._bell is not None

    def ring(self) -> None:
        """There are requests."""
        if self._bell is not None:
            self._bell.ring()

    async def run(self) -> None:
        """Keep an engine alive, until cancelled or too many have died at once and done nothing before."""
        n_fast = 0
        while n_fast < MOST_FAST_DEATHS:
            started, self._has_rung = time.monotonic(), False
            try:
                reason = await self._run_once()
            except Exception as error:  # no process or file descriptor is left, for one
                logger.exception("the engine could not be looked after")
                reason = f"it could not be looked after: {error!r}"
            if self.n_starts == 1 and self._code == UNUSABLE:
                self.unusable = self._last_line
                logger.critical("giving up: %s", self.unusable)
                break
            has_lived = self._code != UNUSABLE and time.monotonic() - started > LONG_LIFE_SEC
            was_useful = self._has_rung or has_lived
            n_fast = 1 if was_useful else n_fast + 1
            logger.error("the engine has died: %s", reason)
            if n_fast < MOST_FAST_DEATHS:
                pause = min(LONGEST_PAUSE_SEC, self._first_pause_sec * 2 ** (n_fast - 1))
                logger.info("starting the engine again in %.1f s", pause)
                await asyncio.sleep(pause)
        else:
            self.failure = f"the engine died {n_fast} times soon after it was started, the last time with: {reason}"
            logger.critical("giving up: %s", self.failure)
        self._on_ring()

    async def _run_once(self) -> str:
        """An engine from its beginning to its end; why it ended."""
        ours, theirs = Doorbell.pair()
        with ours:
            with theirs:
                process = await self._start(theirs)
            self._bell = ours
            ours.listen(self._note_ring)
            try:
                await self._relay(process)
                self._code = await process.wait()
            finally:
                self._bell = None
                ours.stop_listening()
                await _end(process)
        if self._code < 0:
            return f"signal {-self._code}"
        return f"exit status {self._code}, after it said: {self._last_line}"

    @property
    def _last_line(self) -> str:
        return self._last_lines[-1] if self._last_lines else "nothing"

    def _note_ring(self) -> None:
        """There are results, or the engine has ended."""
        self._has_rung |= self._bell is not None and not self._bell.is_hung_up
        self._on_ring()

    async def _start(self, theirs: Doorbell) -> asyncio.subprocess.Process:
        self.n_starts += 1
        self._last_lines.clear()
        fd = theirs.fileno()
        return await asyncio.create_subprocess_exec(
            *self._command,
            "--doorbell-fd",
            str(fd),
            *arguments_of(self._config),
            pass_fds=(fd,),
            env={**ENVIRONMENT, **os.environ, **environment_of(self._config)},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that ctrl-C ends the server, which then ends the engine
        )

    async def _relay(self, process: asyncio.subprocess.Process) -> None:
        """Pass on what it says, and remember the end of it."""
        assert process.stderr is not None
        while chunk := await process.stderr.read(1 << 16):
            text = chunk.decode("utf-8", "replace")
            with contextlib.suppress(OSError):  # the log's disk may be full
                sys.stderr.write(text)
            self._last_lines.extend(line[-500:] for line in text.splitlines() if line.strip())


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask it to end, and after a while make it."""
    for stop in (process.terminate, process.kill):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SEC):
                await process.wait()
