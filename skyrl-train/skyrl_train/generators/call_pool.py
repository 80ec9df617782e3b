"""Blocking calls in a bounded number of threads, each with a limit in time.

A thread cannot be killed. A call that takes too long, or whose caller is gone, is interrupted where Python can
interrupt it, and its thread is written off: another takes its place, so that no call waits for one that hangs.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

logger = logging.getLogger(__name__)

CHECKS_PER_LIMIT = 10  # how often running calls are looked at in the time that one may take


class CallTimeout(Exception):
    """A call took longer than it may."""


class _Interrupted(BaseException):
    """Raised inside a call that has been written off."""


class CallOwner(Protocol):
    """Who must know that a call was written off in the middle."""

    def lose(self) -> None:
        """The call goes on by itself. Called in the event loop."""

    def clean_up(self) -> None:
        """The call has come back after all. Called in its thread."""


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], Any]
    owner: CallOwner | None
    future: asyncio.Future[Any]
    started: float | None = None
    is_written_off: bool = False


class CallPool:
    """`n_workers` threads, started when they are needed. One event loop uses it."""

    def __init__(self, n_workers: int, name: str) -> None:
        self._n_workers = n_workers
        self._name = name
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()  # at work or waiting for it
        self._late: set[threading.Thread] = set()  # written off and still busy
        self._running: dict[threading.Thread, _Call] = {}
        self._n_open = 0  # calls queued or running
        self._lock = threading.Lock()
        self._answers: deque[tuple[_Call, Any, Exception | None]] = deque()
        self._is_woken = False
        self._watch: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[[], Any], limit_s: float | None, owner: CallOwner | None = None) -> Any:
        """What `function` returns or raises.

        Raises:
            CallTimeout: it ran for `limit_s` seconds; the time it waited for a thread does not count.
        """
        loop = asyncio.get_running_loop()
        call = _Call(function, owner, loop.create_future())
        self._n_open += 1
        if len(self._threads) < min(self._n_workers, self._n_open):
            self._start_thread(loop)
        self._queue.put(call)
        if limit_s is not None and self._watch is None:
            self._watch = loop.call_later(limit_s / CHECKS_PER_LIMIT, self._check, loop, limit_s)
        try:
            return await call.future
        finally:
            self._n_open -= 1
            if call.future.cancelled():
                self._write_off(call)

    def close(self) -> None:
        """End the threads. Those that are stuck in a call are interrupted, waited for briefly, and then named."""
        if self._watch is not None:
            self._watch.cancel()
        with self._lock:
            running = list(self._running.values())
        for call in running:
            self._write_off(call)
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + 2
        for thread in [*self._threads, *self._late]:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if stuck := [thread.name for thread in [*self._threads, *self._late] if thread.is_alive()]:
            logger.warning(
                "%d calls never returned and their threads are left behind: %s; with "
                "environment.skyrl_gym.isolation=process such calls are ended",
                *(len(stuck), ", ".join(sorted(stuck))),
            )

    # -- in the threads

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        thread = threading.current_thread()
        try:
            while (call := self._queue.get()) is not None:
                if not self._carry_out(call, thread, loop):
                    return
        except _Interrupted:  # came after the call it was meant for
            pass
        finally:
            self._late.discard(thread)

    def _carry_out(self, call: _Call, thread: threading.Thread, loop: asyncio.AbstractEventLoop) -> bool:
        """Make a call; False if the thread was written off meanwhile."""
        with self._lock:
            if call.is_written_off:
                return True
            call.started = time.monotonic()
            self._running[thread] = call
        result: Any = None
        error: Exception | None = None
        try:
            result = call.function()
        except (StopIteration, SystemExit, KeyboardInterrupt, _Interrupted) as raised:  # not for an event loop's ears
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
            error.__cause__ = raised
        except Exception as raised:  # noqa: BLE001, handed to who called
            error = raised
        with self._lock:
            self._running.pop(thread, None)
            is_written_off = call.is_written_off
        if is_written_off:
            if call.owner is not None:
                call.owner.clean_up()
            return False
        self._answers.append((call, result, error))
        if not self._is_woken:
            self._is_woken = True
            loop.call_soon_threadsafe(self._hand_out)
        return True

    # -- in the event loop

    def _start_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        name = f"{self._name}-{len(self._threads) + len(self._late)}"
        thread = threading.Thread(target=self._work, args=(loop,), name=name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _hand_out(self) -> None:
        """Answers that have come in since the event loop was last woken."""
        self._is_woken = False
        while self._answers:
            call, result, error = self._answers.popleft()
            if call.future.done():
                continue
            if error is None:
                call.future.set_result(result)
            else:
                call.future.set_exception(error)

    def _check(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        """Write off calls that have run for too long."""
        now = time.monotonic()
        with self._lock:
            late = [call for call in self._running.values() if now - (call.started or now) >= limit_s]
        for call in late:
            if self._write_off(call) and not call.future.done():
                call.future.set_exception(CallTimeout(f"took longer than {limit_s:g} s"))
        self._watch = loop.call_later(limit_s / CHECKS_PER_LIMIT, self._check, loop, limit_s) if self._n_open else None

    def _write_off(self, call: _Call) -> bool:
        """Give a call up; its thread, if it has one, is interrupted and gets no other. False if it has ended."""
        with self._lock:
            call.is_written_off = True
            thread = next((thread for thread, running in self._running.items() if running is call), None)
            if thread is None:
                return False
            del self._running[thread]
        self._threads.discard(thread)
        self._late.add(thread)
        if call.owner is not None:
            call.owner.lose()
        if thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupted))
        if self._queue.qsize() and len(self._threads) < self._n_workers:
            self._start_thread(call.future.get_loop())
        return True
