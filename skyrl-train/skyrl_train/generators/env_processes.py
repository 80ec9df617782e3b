"""Environments in worker processes. Workers that hang are killed; a crash affects only its own environment."""

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
    """At most `max_env_workers` environments at once, each alone in a worker process that is reused afterwards.

    Workers run `environment.skyrl_gym.python` if it is set, for environments whose packages the trainer cannot have.
    Everything that crosses the process boundary is JSON.
    """

    def __init__(self, cfg: SkyRLGymConfig) -> None:
        self._cfg = cfg
        self._slots = asyncio.Semaphore(max(1, cfg.max_env_workers))
        self._idle: deque[_Worker] = deque()
        self._busy: set[_Worker] = set()

    async def open(self) -> Episode:
        """Return an episode, after waiting while all workers are busy."""
        await self._slots.acquire()
        try:
            worker = self._idle.pop() if self._idle else await _Worker.start(self._cfg.python or sys.executable)
        except BaseException:
            self._slots.release()
            raise
        self._busy.add(worker)
        return _ProcessEpisode(self, worker, self._cfg)

    async def close(self) -> None:
        """Kill the workers."""
        for worker in [*self._idle, *self._busy]:
            await worker.kill()
        self._idle.clear()
        self._busy.clear()

    async def release(self, worker: _Worker) -> None:
        """Free a worker's slot. Kill the worker unless it is healthy."""
        self._busy.discard(worker)
        try:
            if worker.is_healthy:
                self._idle.append(worker)
            else:
                await worker.kill()
        finally:
            self._slots.release()


class _ProcessEpisode(Episode):
    def __init__(self, episodes: ProcessEpisodes, worker: _Worker, cfg: SkyRLGymConfig) -> None:
        self._episodes = episodes
        self._worker: _Worker | None = worker
        self._cfg = cfg

    async def make(self, env_class: str, extras: dict[str, Any]) -> None:
        env_config = self._cfg.env_config(env_class)
        await self._call("make", env_class, _entry_point(env_class), spec(env_class).kwargs, env_config, extras)

    async def close(self) -> None:
        if self._worker is None:
            return
        try:
            if self._worker.is_healthy:
                await self._call("close")
        finally:
            worker, self._worker = self._worker, None
            await self._episodes.release(worker)

    async def _call(self, method: str, *args: Any) -> Any:
        assert self._worker is not None
        return await self._worker.call(method, args, self._cfg.call_timeout_seconds)


class _Worker:
    """A process running `skyrl_gym.worker`, and the socket to it."""

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
            EnvError: it did not start.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_MESSAGE_BYTES)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(python, "-m", "skyrl_gym.worker", str(theirs.fileno()), json.dumps(_import_paths())),
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
                f"a worker of {python} did not start: {error}; see its output above. Is skyrl-gym installed there?"
            ) from error
        return worker

    async def call(self, method: str, args: tuple[Any, ...], limit_s: float | None) -> Any:
        """Return the environment's answer, or raise its error as an EnvError. Other errors leave the worker unhealthy.

        Raises:
            TypeError, ValueError: the arguments cannot be encoded as JSON.
        """
        line = json.dumps([method, *args], default=plain).encode() + b"\n"
        self.is_healthy = False  # until the answer is here
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
            raise EnvError(f"answered with more than {MAX_MESSAGE_BYTES:,} bytes") from error
        if not answer:
            raise EnvCrashed(f"its process ended {await self._how_it_ended()}")
        self.is_healthy = True
        kind, value = json.loads(answer)
        if kind == "error":
            raise EnvError(value)
        return value

    async def kill(self) -> None:
        """Kill the process and everything that it started."""
        self.is_healthy = False
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


def _import_paths() -> list[str]:
    """Return the import paths of this program, without those of its Python installation."""
    prefixes = (sys.prefix, sys.base_prefix)
    return [os.getcwd(), *(path for path in sys.path if path and not path.startswith(prefixes))]


def _entry_point(env_class: str) -> str:
    """Return the `module:ClassName` from which a worker imports an environment.

    Raises:
        EnvError: it was registered as an object that another process cannot import.
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
