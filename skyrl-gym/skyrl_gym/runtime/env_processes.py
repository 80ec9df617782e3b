"""Environments in worker processes. Workers that hang are killed, and a crash affects only its own environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import deque
from typing import Any

from skyrl_gym.envs.registration import spec
from skyrl_gym.error import EnvCrashed, EnvTimeout, EpisodeError
from skyrl_gym.runtime.env_pool import Episode
from skyrl_gym.runtime.packages import import_paths
from skyrl_gym.runtime.serialization import to_json_value

MAX_MESSAGE_BYTES = 1 << 26
START_SECONDS = 60.0
EXIT_SECONDS = 5.0


class ProcessEpisodes:
    """At most `max_processes` environments at once, each alone in a worker process. Workers are reused.

    Everything that crosses the process boundary is JSON.
    """

    def __init__(self, max_processes: int, limit_s: float | None, python: str | None = None) -> None:
        """Limit each call to `limit_s` seconds.

        Workers use the interpreter `python`, by default this program's, for environments whose packages conflict with
        the trainer's.
        """
        self.limit_s, self.python = limit_s, python or sys.executable
        self._slots = asyncio.Semaphore(max(1, max_processes))
        self._idle: deque[_Worker] = deque()
        self._busy: set[_Worker] = set()

    async def open(self) -> Episode:
        """Return an episode. Wait while all workers are busy."""
        await self._slots.acquire()
        try:
            while self._idle and not self._idle[-1].is_healthy:  # it died after its last episode
                await self._idle.pop().kill()
            worker = self._idle.pop() if self._idle else await _Worker.start(self)
        except BaseException:
            self._slots.release()
            raise
        self._busy.add(worker)
        return worker

    async def close(self) -> None:
        """End the workers. Idle ones have `EXIT_SECONDS` to clean up, e.g. to remove temporary files."""
        await asyncio.gather(*(worker.end() for worker in self._idle), *(worker.kill() for worker in self._busy))
        self._idle.clear()
        self._busy.clear()

    async def release(self, worker: _Worker) -> None:
        """Free a worker's slot, and kill the worker if it is not healthy."""
        self._busy.discard(worker)
        try:
            if worker.is_healthy:
                self._idle.append(worker)
            else:
                await worker.kill()
        finally:
            self._slots.release()


class _Worker(Episode):
    """A `skyrl_gym.runtime.worker` process and the socket to it. It plays one episode after another."""

    def __init__(
        self,
        pool: ProcessEpisodes,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._pool = pool
        self._process = process
        self._reader = reader
        self._writer = writer
        self._has_answered = True

    @property
    def is_healthy(self) -> bool:
        """True if the process is running and has answered all calls."""
        return self._has_answered and self._process.returncode is None and not self._reader.at_eof()

    @classmethod
    async def start(cls, pool: ProcessEpisodes) -> _Worker:
        """Start a process, or raise EpisodeError."""
        python = pool.python
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_MESSAGE_BYTES)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(python, "-m", "skyrl_gym.runtime.worker", str(theirs.fileno()), json.dumps(import_paths())),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdin=asyncio.subprocess.DEVNULL,
                )
            except BaseException as error:
                writer.close()
                if not isinstance(error, OSError):
                    raise
                raise EpisodeError(f"cannot run environment.skyrl_gym.python={python}: {error.strerror}") from error
        worker = cls(pool, process, reader, writer)
        try:
            await worker._exchange("hello", (), START_SECONDS)
        except BaseException as error:
            await worker.kill()
            if not isinstance(error, EpisodeError):
                raise
            raise EpisodeError(
                f"a worker of {python} did not start: {error}; see its output above. Is skyrl-gym installed there?"
            ) from error
        return worker

    async def make(self, env_class: str, env_config: Any, extras: dict[str, Any]) -> None:
        entry_point = spec(env_class).entry_point
        if not isinstance(entry_point, str):
            name, module = getattr(entry_point, "__qualname__", "<"), getattr(entry_point, "__module__", "__main__")
            if "<" in name or module == "__main__":
                raise EpisodeError(
                    "environment.skyrl_gym.isolation=process imports environments in another process, but "
                    f"{env_class!r} is registered as {entry_point!r}; register it as 'module:ClassName'"
                )
            entry_point = f"{module}:{name}"
        await self.call("make", env_class, entry_point, spec(env_class).kwargs, env_config, extras)

    async def call(self, method: str, *args: Any) -> Any:
        return await self._exchange(method, args, self._pool.limit_s)

    async def close(self) -> None:
        try:
            if self.is_healthy:
                await self.call("close")
        finally:
            await self._pool.release(self)

    async def _exchange(self, method: str, args: tuple[Any, ...], limit_s: float | None) -> Any:
        """Send a call and return the environment's answer.

        After a timeout (EnvTimeout), a crash (EnvCrashed), an oversized answer (EpisodeError) or a cancellation, the
        worker is unhealthy. Errors of the environment become EpisodeError. Arguments that JSON cannot encode raise
        TypeError or ValueError.
        """
        line = json.dumps([method, *args], default=to_json_value).encode() + b"\n"
        self._has_answered = False
        try:
            async with asyncio.timeout(limit_s):
                self._writer.write(line)
                await self._writer.drain()
                answer = await self._reader.readline()
        except TimeoutError as error:
            raise EnvTimeout(f"took longer than {limit_s:g} s") from error
        except ConnectionError:
            answer = b""
        except ValueError as error:
            raise EpisodeError(f"answered with more than {MAX_MESSAGE_BYTES:,} bytes") from error
        if not answer:
            raise EnvCrashed(f"its process ended {await self._how_it_ended()}")
        self._has_answered = True
        kind, value = json.loads(answer)
        if kind == "error":
            raise EpisodeError(value)
        return value

    async def end(self) -> None:
        """Let the process exit, and kill what is left of it after `EXIT_SECONDS`."""
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """Kill the process and its children."""
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _how_it_ended(self) -> str:
        try:
            async with asyncio.timeout(5):
                code = await self._process.wait()
        except TimeoutError:
            return "its connection, but still runs"
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
