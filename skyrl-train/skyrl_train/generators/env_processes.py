"""Environments in processes of their own: what one does to its process, or needs in it, is nobody else's trouble."""

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
from skyrl_gym.serialization import plain
from skyrl_train.config.environment import SkyRLGymConfig
from skyrl_train.errors import EnvError
from skyrl_train.generators.episodes import EnvCrashed, EnvTimeout, Episode

MAX_MESSAGE_BYTES = 1 << 26
START_SECONDS = 60.0


class ProcessEpisodes:
    """At most `max_env_workers` environments at once, each alone in a worker process; a worker serves many in turn.

    The workers run `environment.skyrl_gym.python`, where it is set: an environment may need packages that training
    cannot have. Everything that crosses over is JSON.
    """

    def __init__(self, cfg: SkyRLGymConfig) -> None:
        self.env_config = cfg.env_config
        self._limit_s = cfg.call_timeout_seconds
        self._python = cfg.python or sys.executable
        self._slots = asyncio.Semaphore(max(1, cfg.max_env_workers))
        self._idle: deque[_Worker] = deque()
        self._busy: set[_Worker] = set()

    async def open(self) -> Episode:
        """See `Episodes.open`. Waits while all workers are busy."""
        await self._slots.acquire()
        try:
            worker = self._idle.pop() if self._idle else await _Worker.start(self._python)
        except BaseException:
            self._slots.release()
            raise
        self._busy.add(worker)
        return _ProcessEpisode(self, worker, self._limit_s)

    async def close(self) -> None:
        """See `Episodes.close`."""
        for worker in [*self._idle, *self._busy]:
            await worker.kill()
        self._idle.clear()
        self._busy.clear()

    async def give_back(self, worker: _Worker) -> None:
        """A worker without an environment serves the next; one that misbehaved is ended."""
        self._busy.discard(worker)
        try:
            if worker.is_healthy:
                self._idle.append(worker)
            else:
                await worker.kill()
        finally:
            self._slots.release()


class _ProcessEpisode(Episode):
    def __init__(self, episodes: ProcessEpisodes, worker: _Worker, limit_s: float | None) -> None:
        self._episodes = episodes
        self._worker: _Worker | None = worker
        self._limit_s = limit_s

    async def make(self, env_class: str, extras: dict[str, Any]) -> None:
        env_config = self._episodes.env_config(env_class)
        await self._call("make", env_class, _entry_point(env_class), spec(env_class).kwargs, env_config, extras)

    async def close(self) -> None:
        if self._worker is None:
            return
        try:
            if self._worker.is_healthy:
                await self._call("close")
        finally:
            worker, self._worker = self._worker, None
            await self._episodes.give_back(worker)

    async def _call(self, method: str, *args: Any) -> Any:
        assert self._worker is not None
        return await self._worker.call(method, args, self._limit_s)


class _Worker:
    """One process, and the line to it."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.is_healthy = True

    @classmethod
    async def start(cls, python: str) -> _Worker:
        """Start a process.

        Raises:
            EnvError: it does not come up.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_MESSAGE_BYTES)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(python, "-m", "skyrl_gym.worker", str(theirs.fileno()), json.dumps(_own_paths())),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdin=asyncio.subprocess.DEVNULL,
                )
            except BaseException as error:
                writer.close()
                if not isinstance(error, OSError):
                    raise
                raise EnvError(f"environment.skyrl_gym.python={python} cannot be run: {error.strerror}") from error
        worker = cls(process, reader, writer)
        try:
            await worker.call("hello", (), START_SECONDS)
        except BaseException as error:
            await worker.kill()
            if not isinstance(error, EnvError):
                raise
            raise EnvError(
                f"a worker of {python} did not start: {error}; its own words stand above. Is skyrl-gym installed there?"
            ) from error
        return worker

    async def call(self, method: str, args: tuple[Any, ...], limit_s: float | None) -> Any:
        """What the environment answers, or what it raises as EnvError. Anything else ends the worker's use.

        Raises:
            TypeError, ValueError: the arguments have no JSON, or hold themselves.
        """
        line = json.dumps([method, *args], default=plain).encode() + b"\n"
        is_over = False
        try:
            async with asyncio.timeout(limit_s):
                self._writer.write(line)
                await self._writer.drain()
                answer = await self._reader.readline()
            is_over = bool(answer)
        except TimeoutError as error:
            raise EnvTimeout(f"took longer than {limit_s:g} s") from error
        except ConnectionError:
            answer = b""
        except ValueError as error:
            raise EnvError(f"answered with more than {MAX_MESSAGE_BYTES:,} bytes") from error
        finally:
            self.is_healthy = is_over
        if not answer:
            raise EnvCrashed(f"its process ended {await self._how()}")
        kind, value = json.loads(answer)
        if kind == "error":
            raise EnvError(value)
        return value

    async def kill(self) -> None:
        """End the process and all that it started."""
        self.is_healthy = False
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _how(self) -> str:
        try:
            async with asyncio.timeout(5):
                code = await self._process.wait()
        except TimeoutError:
            return "its line and goes on in silence"
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"


def _own_paths() -> list[str]:
    """Where this program's own modules are: everything on the path that no interpreter brought along."""
    prefixes = (sys.prefix, sys.base_prefix)
    return [os.getcwd(), *(path for path in sys.path if path and not path.startswith(prefixes))]


def _entry_point(env_class: str) -> str:
    """Where a worker imports the environment from.

    Raises:
        EnvError: it was registered as something that no other process can find.
    """
    entry_point = spec(env_class).entry_point
    if isinstance(entry_point, str):
        return entry_point
    name, module = getattr(entry_point, "__qualname__", "<"), getattr(entry_point, "__module__", "__main__")
    if "<" in name or module == "__main__":
        raise EnvError(
            f"environment.skyrl_gym.isolation=process imports environments in another process, and {env_class!r} is "
            f"registered as {entry_point!r}; register it as 'module:ClassName'"
        )
    return f"{module}:{name}"
