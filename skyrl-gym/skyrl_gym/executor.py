"""Calls into environments as training makes them, each with a limit in time.

Blocking methods run in threads, none of which is the main one, and the next call of an episode in another one; what is
awaited runs in one event loop. A thread cannot be killed: a call that hangs is left behind.
"""

from __future__ import annotations

import asyncio
import random
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Self

NAME = "skyrl-gym-env"  # of all threads: which one it was says nothing
CLOSE_SECONDS = 2.0
MAX_FRAMES = 8
N_SLOW_LINES = 100  # of a call beside others
SLOW_LINE_SECONDS = 1e-3  # at most; a fifth of it on average
STANDARD_LIBRARY = sysconfig.get_path("stdlib")


@dataclass(frozen=True, slots=True)
class Call:
    """A function, or with `is_awaited` a coroutine function, that is called without arguments."""

    function: Callable[[], Any]
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call."""

    value: Any = None
    error: BaseException | None = None
    hangs_at: str | None = None  # the lines that it is in, the innermost last
    seconds: float = 0.0


class Executor:
    """Threads and an event loop, from `with` to its end."""

    def __init__(self, n_threads: int, limit_s: float) -> None:
        """`n_threads` blocking calls can run at once; from two on, calls that follow one another change threads."""
        self._n_threads = n_threads
        self.limit_s = limit_s
        self.is_stuck = False  # a call hangs

    def __enter__(self) -> Self:
        self._threads = [_Thread() for _ in range(self._n_threads)]
        self._idle = deque(self._threads)
        self._loop = _Loop()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads. What hangs, or refuses to be cancelled, stays behind."""
        for worker in self._threads:
            worker.end()
        self._loop.end()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in (*(idle.thread for idle in self._idle), self._loop.thread):
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    @property
    def was_stopped(self) -> bool:
        """Whether a call stopped the event loop, which went on here."""
        return self._loop.was_stopped

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Make calls at the same time. Those in threads are slowed down then, so that they meet.

        After one that hangs, no other can be made.
        """
        assert not self.is_stuck
        threads = [None if call.is_awaited else self._idle.popleft() for call in calls]
        start = threading.Barrier(max(1, len(threads) - threads.count(None)))
        begun = [
            self._loop.begin(call.function) if thread is None else thread.begin(call.function, start, seed)
            for seed, (call, thread) in enumerate(zip(calls, threads, strict=True))
        ]
        deadline = time.monotonic() + self.limit_s
        outcomes = [each.outcome(deadline) or Outcome(hangs_at=each.told(), seconds=self.limit_s) for each in begun]
        for thread, outcome in zip(threads, outcomes, strict=True):
            if outcome.hangs_at is not None:
                self.is_stuck = True
            elif thread is not None:
                self._idle.append(thread)
        return outcomes


@dataclass(frozen=True, slots=True)
class _Begun:
    """A call that has been made."""

    future: Future[Outcome]
    stack: Callable[[], traceback.StackSummary]

    def outcome(self, deadline: float) -> Outcome | None:
        """Waits for it until then, by `time.monotonic`; None if it has not come back."""
        try:
            return self.future.result(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return None

    def told(self) -> str:
        """A line for each of the innermost frames that it is in."""
        stack = self.stack()
        ours = max((i for i, frame in enumerate(stack) if frame.filename == __file__), default=-1)
        return "\n".join(
            f"  {Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {frame.line}"
            for frame in stack[ours + 1 :][-MAX_FRAMES:]
        )


class _Thread:
    """A thread that makes one call after another."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=NAME, daemon=True)
        self.thread.start()

    def begin(self, function: Callable[[], Any], start: threading.Barrier, seed: int) -> _Begun:
        """Call `function` once all have come to `start`; if there are others, slowly."""
        future: Future[Outcome] = Future()

        def make() -> None:
            start.wait()
            future.set_result(_outcome(function if start.parties == 1 else partial(_slowly, function, seed)))

        self._queue.put(make)
        return _Begun(future, lambda: _stack_of(self.thread))

    def end(self) -> None:
        """End the thread when it is idle."""
        self._queue.put(None)

    def _work(self) -> None:
        while (make := self._queue.get()) is not None:
            make()
            del make  # or the environment lives on until the next call


class _Loop:
    """An event loop in a thread. It turns between calls too."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_over = threading.Event()
        self.was_stopped = False  # by an environment
        self.thread = threading.Thread(target=self._turn, name=NAME, daemon=True)
        self.thread.start()

    def begin(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> _Begun:
        """Await what `function` returns."""
        coroutine = _awaited_outcome(function)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)

        def stack() -> traceback.StackSummary:
            is_busy = asyncio.current_task(self._loop) is not None  # then this keeps all others waiting
            return _stack_of(self.thread) if is_busy else _extracted(_suspended_in(coroutine))

        return _Begun(future, stack)

    def end(self) -> None:
        """End the thread when the tasks have been cancelled that are left."""
        self._is_over.set()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _turn(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop):  # which cancels what is left
            self._loop.run_forever()
            while not self._is_over.is_set():
                self.was_stopped = True
                self._loop.run_forever()


def _outcome(function: Callable[[], Any]) -> Outcome:
    started = time.monotonic()
    try:
        return Outcome(value=function(), seconds=time.monotonic() - started)
    except BaseException as error:  # noqa: BLE001, the boundary of a call; SystemExit is no reason to end
        return Outcome(error=error, seconds=time.monotonic() - started)


async def _awaited_outcome(function: Callable[[], Coroutine[Any, Any, Any]]) -> Outcome:
    started = time.monotonic()
    try:
        return Outcome(value=await function(), seconds=time.monotonic() - started)
    except BaseException as error:  # noqa: BLE001, as above
        return Outcome(error=error, seconds=time.monotonic() - started)


def _slowly(function: Callable[[], Any], seed: int) -> Any:
    """Call a function that waits before each of its first lines, for threads to meet in the middle of them.

    Python changes threads every 5 ms, and most calls are over by then: in weeks of training they meet all the same.
    """
    n_left = N_SLOW_LINES
    own_random = random.Random(seed)  # those who wait equally long pass by each other

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal n_left
        file = frame.f_code.co_filename
        if file.startswith("<frozen") or (file.startswith(STANDARD_LIBRARY) and "site-packages" not in file):
            return None
        if event == "line":
            n_left -= 1
            if not n_left:
                sys.settrace(None)
            time.sleep(SLOW_LINE_SECONDS * own_random.random() ** 4)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(before)


def _stack_of(thread: threading.Thread) -> traceback.StackSummary:
    """What a thread is in; empty if it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()


def _suspended_in(coroutine: Any) -> Iterator[FrameType]:
    """The frames of a coroutine that waits, the outermost first."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def _extracted(frames: Iterator[FrameType]) -> traceback.StackSummary:
    return traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
