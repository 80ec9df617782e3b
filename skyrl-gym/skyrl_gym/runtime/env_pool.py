"""Environments of rollouts, and the threads that call them.

An `Episode` is one environment, from `make` to `close`. `LocalEpisodes` runs environments in this process: blocking
calls go to a bounded thread pool, each with a time limit. `env_processes.ProcessEpisodes` runs them in worker
processes.

Python cannot kill a thread, so a call that exceeds its limit or is cancelled is abandoned, and a new thread takes its
slot. When the call returns, its old thread closes the environment and ends. Use `isolation=process` for environments
that may hang.
"""

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from typing import Any, Protocol

import skyrl_gym
from skyrl_gym.error import EnvTimeout
from skyrl_gym.runtime.methods import async_method, end_forked_children
from skyrl_gym.runtime.text import describe_error

logger = logging.getLogger(__name__)

CHECK_S = 0.005  # interval of checks for late calls. If calls wait longer for a thread, more threads start.
JOIN_S = 2.0  # maximum wait of `ThreadPool.close` for running calls


class Episode(ABC):
    """One environment, from `make` to `close`. Every method may raise EnvTimeout."""

    @abstractmethod
    async def make(self, env_class: str, env_config: Any, extras: dict[str, Any]) -> None:
        """Build the environment with its section of the configuration. Call `close` even if this fails."""

    @abstractmethod
    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the environment. Whatever it raises is raised here as an `Exception`."""

    @abstractmethod
    async def close(self) -> None:
        """Close the environment once. If a call hangs, close it when that call returns."""


class CallOwner(Protocol):
    """An object whose methods run in the pool."""

    is_stuck: bool  # an abandoned call may still be using the object

    def close_late(self) -> None:
        """Clean up after an abandoned call has returned. Called in the thread of that call."""


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], Any]
    owner: CallOwner | None
    future: asyncio.Future[Any]
    time: float  # `time.monotonic` when the call entered the queue, and later when it left the queue
    thread: threading.Thread | None = None  # None while queued
    is_over: bool = False  # finished or abandoned, whichever came first
    result: Any = None
    error: Exception | None = None


class ThreadPool:
    """At most `max_threads` daemon threads for the blocking calls of one event loop.

    Quick calls share one thread, because Python runs only one thread at a time anyway. More threads start when calls
    have to wait. With `max_threads=0`, calls run in the event loop without a time limit.
    """

    def __init__(self, max_threads: int, limit_s: float | None, name: str) -> None:
        """Limit each call to `limit_s` seconds, not counting the time it waits for a thread."""
        self._max_threads = max_threads
        self.limit_s = limit_s
        self._names = (f"{name}-{i}" for i in count())
        self._calls: dict[_Call, None] = {}  # unanswered, oldest first
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards `_Call.is_over`
        self._threads: list[threading.Thread] = []
        self._stuck: list[threading.Thread] = []  # threads of abandoned calls
        self._finished: deque[_Call] = deque()
        self._is_woken = False  # `_deliver` is scheduled
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def run(self, function: Callable[[], Any], owner: CallOwner | None = None) -> Any:
        """Call `function` and return its result. Raise its error as an `Exception`, or EnvTimeout after the limit."""
        if self._is_closed:
            raise _closed_error()
        if not self._max_threads:
            with errors_as_exceptions():
                return function()
        loop = asyncio.get_running_loop()
        call = _Call(function, owner, loop.create_future(), time.monotonic())
        self._calls[call] = None
        self._queue.put(call)
        if not self._threads:
            self._start_thread(loop)
        if self._timer is None:
            self._timer = loop.call_later(CHECK_S, self._check, loop)
        try:
            return await call.future
        finally:
            del self._calls[call]
            if call.future.cancelled():
                self._abandon(call, loop)

    async def close(self) -> None:
        """Fail all calls, then end the threads. Log the number of threads that are still stuck."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls:
            self._abandon(call, call.future.get_loop())
            if not call.future.done():
                call.future.set_exception(_closed_error())
        for _ in self._threads:
            self._queue.put(None)
        if n_stuck := await asyncio.to_thread(_join, [*self._threads, *self._stuck]):
            logger.warning(
                "%d threads are stuck in calls that never returned; run environments that may hang with "
                "environment.skyrl_gym.isolation=process",
                n_stuck,
            )

    def _start_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        thread = threading.Thread(target=self._work, args=(loop,), name=next(self._names), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run calls until the pool is closed or a call is abandoned."""
        while (call := self._queue.get()) is not None:
            with self._lock:
                if call.is_over:
                    continue
                call.time, call.thread = time.monotonic(), threading.current_thread()  # `_check` relies on this order
            try:
                with end_forked_children():
                    call.result = call.function()
            except BaseException as error:  # noqa: BLE001, the event loop raises it to the caller
                call.error = _as_exception(error)
            with self._lock:
                was_abandoned, call.is_over = call.is_over, True
            if was_abandoned:
                if call.owner is not None:
                    call.owner.close_late()
                return
            self._finished.append(call)
            if not self._is_woken:
                self._is_woken = True
                loop.call_soon_threadsafe(self._deliver)
            del call  # do not keep the environment alive while waiting for the next call

    def _deliver(self) -> None:
        """Resolve the futures of finished calls."""
        self._is_woken = False
        while self._finished:
            call = self._finished.popleft()
            if call.future.done():
                continue
            if call.error is None:
                call.future.set_result(call.result)
            else:
                call.future.set_exception(call.error)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Abandon calls that exceeded their limit, and double the number of threads if calls have to wait."""
        now, waiting_s = time.monotonic(), 0.0
        for call in self._calls:
            if call.thread is None:
                waiting_s = now - call.time
                break  # the calls after it are also queued
            is_late = self.limit_s is not None and now - call.time >= self.limit_s
            if is_late and not call.future.done() and self._abandon(call, loop):
                call.future.set_exception(EnvTimeout(f"took longer than {self.limit_s:g} s"))
        if waiting_s > CHECK_S:
            n_threads = len(self._threads)
            for _ in range(min(n_threads, self._queue.qsize(), self._max_threads - n_threads)):
                self._start_thread(loop)
        self._timer = loop.call_later(CHECK_S, self._check, loop) if self._calls else None

    def _abandon(self, call: _Call, loop: asyncio.AbstractEventLoop) -> bool:
        """Give up a call, and remove its thread from the pool. Return False if the call is not running."""
        with self._lock:
            thread = None if call.is_over else call.thread
            call.is_over = True
        if thread is None:
            return False
        if call.owner is not None:
            call.owner.is_stuck = True
        self._threads.remove(thread)
        self._stuck = [stuck for stuck in self._stuck if stuck.is_alive()] + [thread]
        if not self._threads and not self._queue.empty() and not self._is_closed:
            self._start_thread(loop)
        return True


class LocalEpisodes:
    """Environments in this process. `…_async` methods run in the event loop, blocking methods in threads."""

    def __init__(self, max_threads: int, limit_s: float | None) -> None:
        """Limit each call to `limit_s` seconds. With `max_threads=0`, blocking methods run in the event loop, too."""
        self._pool = ThreadPool(max_threads, limit_s, "skyrl-gym-env")

    async def open(self) -> Episode:
        """Return an episode. This never waits: only the episode's calls wait for a thread."""
        return _LocalEpisode(self._pool)

    async def close(self) -> None:
        """End the threads."""
        await self._pool.close()


class _LocalEpisode(Episode):
    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._env: Any = None
        self.is_stuck = False

    async def make(self, env_class: str, env_config: Any, extras: dict[str, Any]) -> None:
        def make() -> None:
            self._env = skyrl_gym.make(env_class, env_config=env_config, extras=extras)

        await self._pool.run(make, self)

    async def close(self) -> None:
        if not self.is_stuck and self._env is not None:
            await self.call("close")

    def close_late(self) -> None:
        """Close the environment in the thread of an abandoned call."""
        try:
            if self._env is not None:
                self._env.close()
        except BaseException:  # the rollout has already been reported as invalid
            logger.warning("Failed to close an environment after a call that took too long", exc_info=True)

    async def call(self, method: str, *args: Any) -> Any:
        native = async_method(self._env, method)
        if native is not None:
            return await await_with_timeout(native(*args), self._pool.limit_s)
        bound = getattr(self._env, method)
        return await self._pool.run(lambda: bound(*args), None if method == "close" else self)


async def await_with_timeout(awaitable: Awaitable[Any], limit_s: float | None) -> Any:
    """Await a coroutine of an environment, an agent, a task or a tool, or raise EnvTimeout after `limit_s` seconds.

    Exceptions pass through unchanged. SystemExit and a CancelledError that the coroutine raises itself become
    RuntimeError. `limit_s=None` sets no limit.
    """
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            with errors_as_exceptions():
                return await awaitable
    except TimeoutError as error:
        if not limit.expired():  # the coroutine raised it
            raise
        raise EnvTimeout(f"took longer than {limit_s:g} s") from error


@contextmanager
def errors_as_exceptions() -> Iterator[None]:
    """Turn SystemExit, CancelledError and the like from user code into RuntimeError, so that they cannot end the run.

    KeyboardInterrupt is not changed: before training starts, Ctrl-C must end the program. If user code forked, the
    child process ends here.
    """
    try:
        with end_forked_children():
            yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # the rollout was cancelled
        raise _as_exception(error) from error


def call_contained(function: Callable[..., Any], *args: Any) -> Any:
    """Call user code whose errors go into a future. SystemExit, StopIteration and the like become RuntimeErrors."""
    try:
        return function(*args)
    except BaseException as error:
        raise _as_exception(error) from error


def _as_exception(raised: BaseException) -> Exception:
    """Return `raised`, or a RuntimeError with the same text if a coroutine cannot raise it."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    error = RuntimeError(describe_error(raised))
    error.__cause__ = raised
    return error


def _closed_error() -> RuntimeError:
    return RuntimeError("the thread pool is closed; call close() after the last call")


def _join(threads: list[threading.Thread]) -> int:
    """Wait up to `JOIN_S` for threads to end. Return how many are still alive."""
    deadline = time.monotonic() + JOIN_S
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
    return sum(thread.is_alive() for thread in threads)
