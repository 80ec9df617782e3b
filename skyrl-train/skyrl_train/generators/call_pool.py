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

BLOCKED_S = 0.005  # after which a thread in the middle of a call is taken to be waiting for something
LATEST_CHECK_S = 1.0


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
    """At most `n_workers` threads, for one event loop.

    Calls that compute get one thread, since Python runs no two at a time; others are started when calls block.
    """

    def __init__(self, n_workers: int, limit_s: float | None, name: str) -> None:
        """A call may run for `limit_s` seconds; the time it waits for a thread does not count."""
        self._n_workers = n_workers
        self._limit_s = limit_s
        self._name = name
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()  # at work or waiting for it
        self._late: set[threading.Thread] = set()  # written off and still busy
        self._running: dict[threading.Thread, _Call] = {}
        self._n_open = 0  # calls queued or running
        self._n_ended = 0  # calls so far
        self._n_ended_before = 0  # at the last check
        self._lock = threading.Lock()
        self._answers: deque[tuple[_Call, Any, Exception | None]] = deque()
        self._is_woken = False
        self._watch: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[[], Any], owner: CallOwner | None = None) -> Any:
        """What `function` returns or raises.

        Raises:
            CallTimeout: it took too long.
        """
        loop = asyncio.get_running_loop()
        call = _Call(function, owner, loop.create_future())
        self._n_open += 1
        if not self._threads:
            self._start_thread(loop)
        self._queue.put(call)
        if self._watch is None or self._watch.when() > loop.time() + BLOCKED_S:
            self._check_in(BLOCKED_S, loop)
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
        for thread in list(self._late):  # it may be stuck in cleaning up
            _interrupt(thread)
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
                _clean_up(call.owner)
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
            self._n_ended += 1
            if call.future.done():
                continue
            if error is None:
                call.future.set_result(result)
            else:
                call.future.set_exception(error)

    def _check_in(self, delay: float, loop: asyncio.AbstractEventLoop) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = loop.call_later(delay, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give queued calls threads where those there are block, and write off calls that have run for too long."""
        n_queued = self._queue.qsize()
        if n_queued and self._n_ended == self._n_ended_before:
            for _ in range(min(n_queued, self._n_workers - len(self._threads))):
                self._start_thread(loop)
        self._n_ended_before = self._n_ended
        if self._limit_s is not None:
            now = time.monotonic()
            with self._lock:
                late = [call for call in self._running.values() if now - (call.started or now) >= self._limit_s]
            for call in late:
                if self._write_off(call) and not call.future.done():
                    call.future.set_exception(CallTimeout(f"took longer than {self._limit_s:g} s"))
        if self._n_open:
            self._check_in(BLOCKED_S if n_queued else min((self._limit_s or 1) / 10, LATEST_CHECK_S), loop)
        else:
            self._watch = None

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
        _interrupt(thread)
        if self._queue.qsize() and not self._threads:
            self._start_thread(call.future.get_loop())
        return True


def _interrupt(thread: threading.Thread) -> None:
    """Raise `_Interrupted` in a thread, as soon as it runs Python code."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupted))


def _clean_up(owner: CallOwner) -> None:
    try:
        owner.clean_up()
    except Exception:  # nobody waits for it any more
        logger.warning("Cleaning up after a call that took too long failed", exc_info=True)
