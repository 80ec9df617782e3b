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
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

logger = logging.getLogger(__name__)

BLOCKED_S = 0.005  # a call that has waited so long for a thread gets another one
LATEST_CHECK_S = 1.0


class CallTimeout(Exception):
    """A call took longer than it may."""


class _Interrupted(BaseException):
    """Raised inside a call that has been written off."""


class CallOwner(Protocol):
    """Who must know that a call was written off in the middle."""

    def lose(self) -> None:
        """The call goes on by itself. Called where the event loop runs, or in `close`."""

    def clean_up(self) -> None:
        """The call has come back after all. Called in its thread."""


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], Any]
    owner: CallOwner | None
    future: asyncio.Future[Any]
    queued: float  # when, as are all times here, by `time.monotonic`
    started: float | None = None
    is_written_off: bool = False


class CallPool:
    """At most `n_workers` threads, for one event loop.

    Calls that are done at once share one thread, since Python runs no two at a time; others are started when calls
    have to wait.
    """

    def __init__(self, n_workers: int, limit_s: float | None, name: str) -> None:
        """A call may run for `limit_s` seconds; the time it waits for a thread does not count."""
        self._n_workers = n_workers
        self._limit_s = limit_s
        self._name = name
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._open: dict[_Call, None] = {}  # queued, running, or about to be answered; the oldest first
        self._lock = threading.Lock()  # of the next four
        self._threads: set[threading.Thread] = set()  # at work or waiting for it
        self._late: set[threading.Thread] = set()  # written off and still busy
        self._running: dict[threading.Thread, _Call] = {}
        self._is_closed = False
        self._answers: deque[tuple[_Call, Any, Exception | None]] = deque()
        self._is_woken = False
        self._watch: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[[], Any], owner: CallOwner | None = None) -> Any:
        """What `function` returns or raises; what is no `Exception`, as a RuntimeError.

        Raises:
            CallTimeout: it took too long.
        """
        if self._is_closed:
            raise self._closed()
        loop = asyncio.get_running_loop()
        call = _Call(function, owner, loop.create_future(), time.monotonic())
        self._open[call] = None
        if not self._threads:
            self._start_thread(loop)
        self._queue.put(call)
        if self._watch is None or self._watch.when() > loop.time() + BLOCKED_S:
            self._check_in(BLOCKED_S, loop)
        try:
            return await call.future
        finally:
            del self._open[call]
            if call.future.cancelled():
                self._write_off(call)

    def close(self) -> None:
        """End the calls and the threads. Those stuck in a call are interrupted, waited for briefly, and then named."""
        if self._watch is not None:
            self._watch.cancel()
        with self._lock:
            self._is_closed = True
            for thread in self._late:  # it may be stuck in cleaning up
                _interrupt(thread)
        for call in list(self._open):
            self._write_off(call)
            self._answers.append((call, None, self._closed()))
            call.future.get_loop().call_soon_threadsafe(self._hand_out)
        with self._lock:
            threads = [*self._threads, *self._late]
        for _ in threads:
            self._queue.put(None)
        deadline = time.monotonic() + 2
        for thread in threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if stuck := [thread.name for thread in threads if thread.is_alive()]:
            logger.warning(
                "%d calls never returned and their threads are left behind: %s; with "
                "environment.skyrl_gym.isolation=process such calls are ended",
                *(len(stuck), ", ".join(sorted(stuck))),
            )

    def _closed(self) -> RuntimeError:
        return RuntimeError(f"the threads named {self._name} have been ended: close() comes after the last call")

    # -- in the threads

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        thread = threading.current_thread()
        with suppress(_Interrupted):  # by `close`, while it cleaned up
            try:
                while (call := self._queue.get()) is not None:
                    if not self._carry_out(call, thread, loop):
                        return
            finally:
                with self._lock:
                    self._late.discard(thread)
                    self._threads.discard(thread)

    def _carry_out(self, call: _Call, thread: threading.Thread, loop: asyncio.AbstractEventLoop) -> bool:
        """Make a call; False if the thread was written off meanwhile."""
        result: Any = None
        error: Exception | None = None
        try:
            if not self._begin(call, thread):
                return True
            try:
                result = call.function()
            except BaseException as raised:  # noqa: BLE001, handed to who called
                error = _for_an_event_loop(raised)
            is_over = self._end(thread)
        except _Interrupted:  # just before the call, or just after
            is_over = False
        if not is_over:
            if call.owner is not None:
                _clean_up(call.owner)
            return False
        self._answers.append((call, result, error))
        if not self._is_woken:
            self._is_woken = True
            loop.call_soon_threadsafe(self._hand_out)
        return True

    def _begin(self, call: _Call, thread: threading.Thread) -> bool:
        """From here to `_end` the thread may be interrupted. False if the call has been written off."""
        with self._lock:
            if call.is_written_off:
                return False
            call.started = time.monotonic()
            self._running[thread] = call
        return True

    def _end(self, thread: threading.Thread) -> bool:
        """From here on nothing interrupts the thread. False if its call was written off meanwhile."""
        with self._lock:
            return self._running.pop(thread, None) is not None

    # -- in the event loop

    def _start_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._is_closed:
                return
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

    def _check_in(self, delay: float, loop: asyncio.AbstractEventLoop) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = loop.call_later(delay, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Twice the threads where calls wait for one, and write off calls that have run for too long."""
        now, n_threads = time.monotonic(), len(self._threads)
        next_call = next((call for call in self._open if call.started is None), None)
        if next_call is not None and now - next_call.queued > BLOCKED_S:
            for _ in range(min(n_threads, self._queue.qsize(), self._n_workers - n_threads)):
                self._start_thread(loop)
        if self._limit_s is not None:
            with self._lock:
                late = [call for call in self._running.values() if now - (call.started or now) >= self._limit_s]
            for call in late:
                if self._write_off(call) and not call.future.done():
                    call.future.set_exception(CallTimeout(f"took longer than {self._limit_s:g} s"))
        if self._open:
            self._check_in(BLOCKED_S if next_call else min((self._limit_s or 1) / 10, LATEST_CHECK_S), loop)
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
            if call.owner is not None:  # before its thread cleans up
                call.owner.lose()
            _interrupt(thread)
        if self._queue.qsize() and not self._threads:
            self._start_thread(call.future.get_loop())
        return True


def _interrupt(thread: threading.Thread) -> None:
    """Raise `_Interrupted` in a thread, as soon as it runs Python code. Its number is another's once it has ended."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupted))


def _for_an_event_loop(raised: BaseException) -> Exception:
    """The same, or a RuntimeError where the caller, who awaits it, would take it for something else or end of it."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    error = RuntimeError(f"{type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error


def _clean_up(owner: CallOwner) -> None:
    try:
        owner.clean_up()
    except BaseException:  # nobody waits for it any more
        logger.warning("Cleaning up after a call that took too long failed", exc_info=True)
