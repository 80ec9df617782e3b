"""Supervise the engine: start it as a child process, restart it when it dies, and stop it with the server."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from tx.tinker.config import TxConfig, arguments_of, environment_of
from tx.tinker.doorbell import UNUSABLE, Doorbell

logger = logging.getLogger(__name__)

ENGINE = (sys.executable, "-m", "tx.tinker.engine")
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Compiled programs map their working memory anew in each call. Huge pages avoid most page faults."""
MAX_FAST_DEATHS = 5
STABLE_SEC = 60.0
MAX_PAUSE_SEC = 30.0
QUIET_SEC, KILL_SEC = 2.0, 10.0
"""Seconds an engine may take to stop without a message, and to end after it was aborted or killed."""
N_LAST_LINES = 30


class Supervisor:
    """Supervisor of one engine at a time, in the server's event loop."""

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
        self._process: asyncio.subprocess.Process | None = None
        self._last_lines: deque[str] = deque(maxlen=N_LAST_LINES)
        self._has_rung = False
        self._code: int | None = None
        self.n_starts = 0
        self.failure: str | None = None
        """Reason why no engine will be started again, or None."""
        self.unusable: str | None = None
        """Reason why the first engine could not serve with its settings, or None. If set, the server should exit."""

    @property
    def is_running(self) -> bool:
        """True if an engine is running, or still loading the model."""
        return self._bell is not None

    def wake(self) -> None:
        """Wake the engine."""
        if self._bell is not None:
            self._bell.ring()

    def kill(self) -> None:
        """Kill the engine without waiting for its step."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def abort(self, reason: str) -> None:
        """End a hung engine. It shows where it hangs, counts as dead, and is restarted."""
        if self._process is not None:
            logger.error("the engine is aborted: %s", reason)
            await _end(self._process, signal.SIGABRT, KILL_SEC)
            self.kill()

    async def run(self) -> None:
        """Keep an engine running until cancelled, or until too many have died quickly without any result."""
        n_fast = 0
        while n_fast < MAX_FAST_DEATHS:
            started, self._has_rung = time.monotonic(), False
            try:
                reason = await self._run_once()
            except Exception as error:  # e.g. no process or file descriptor is available
                logger.exception("failed to supervise the engine")
                reason = f"it could not be supervised: {error!r}"
            if self.n_starts == 1 and self._code == UNUSABLE:
                self.unusable = self._last_line
                logger.critical("giving up: %s", self.unusable)
                break
            has_lived = self._code != UNUSABLE and time.monotonic() - started > STABLE_SEC
            was_useful = self._has_rung or has_lived
            n_fast = 1 if was_useful else n_fast + 1
            logger.error("the engine has died: %s", reason)
            if n_fast < MAX_FAST_DEATHS:
                pause = min(MAX_PAUSE_SEC, self._first_pause_sec * 2 ** (n_fast - 1))
                logger.info("restarting the engine in %.1f s", pause)
                await asyncio.sleep(pause)
        else:
            self.failure = f"the engine died {n_fast} times shortly after its start, the last time with: {reason}"
            logger.critical("giving up: %s", self.failure)
        self._on_ring()

    async def _run_once(self) -> str:
        """Run an engine until it ends. Return the reason."""
        server_end, engine_end = Doorbell.pair()
        with server_end:
            with engine_end:
                process = await self._start(engine_end)
            self._bell, self._process = server_end, process
            server_end.listen(self._handle_ring)
            try:
                await self._relay(process)
                self._code = await process.wait()
            finally:
                self._bell = None
                server_end.stop_listening()
                await _stop(process, self._config.engine_stop_sec)
                self._process = None
        if self._code < 0:
            return f"signal {-self._code}"
        return f"exit status {self._code}; its last output: {self._last_line}"

    @property
    def _last_line(self) -> str:
        return self._last_lines[-1] if self._last_lines else "nothing"

    def _handle_ring(self) -> None:
        """Handle a ring: there are results, or the engine has ended."""
        self._has_rung |= self._bell is not None and not self._bell.is_hung_up
        self._on_ring()

    async def _start(self, engine_end: Doorbell) -> asyncio.subprocess.Process:
        self.n_starts += 1
        self._last_lines.clear()
        fd = engine_end.fileno()
        return await asyncio.create_subprocess_exec(
            *self._command,
            "--doorbell-fd",
            str(fd),
            *arguments_of(self._config),
            pass_fds=(fd,),
            env={**ENVIRONMENT, **os.environ, **environment_of(self._config)},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # ctrl-C must reach only the server. The server then stops the engine.
        )

    async def _relay(self, process: asyncio.subprocess.Process) -> None:
        """Forward stderr and keep its last lines."""
        assert process.stderr is not None
        while chunk := await process.stderr.read(1 << 16):
            text = chunk.decode("utf-8", "replace")
            with contextlib.suppress(OSError):  # the disk of the log may be full
                sys.stderr.write(text)
            self._last_lines.extend(line[-500:] for line in text.splitlines() if line.strip())


async def _stop(process: asyncio.subprocess.Process, seconds: float) -> None:
    """Terminate a process. Kill it after `seconds`."""
    if await _end(process, signal.SIGTERM, min(QUIET_SEC, seconds)):
        return
    if seconds > QUIET_SEC:
        logger.info("waiting up to %g s for the engine to finish its step; a second signal kills it", seconds)
        if await _end(process, None, seconds - QUIET_SEC):
            return
    await _end(process, signal.SIGKILL, KILL_SEC)


async def _end(process: asyncio.subprocess.Process, number: signal.Signals | None, seconds: float) -> bool:
    """Send a signal, if any, and wait. Return True if the process has ended."""
    if process.returncode is not None:
        return True
    if number is not None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await process.wait()
    return process.returncode is not None
