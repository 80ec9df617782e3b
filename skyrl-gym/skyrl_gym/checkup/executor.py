"""Calls into environments under the conditions of training that are most likely to break them, with a time limit.

Blocking methods never run in the main thread, and with two threads or more, consecutive calls run in different ones.
Coroutines run in one event loop. A thread cannot be killed, so a hanging call is left behind.
"""

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

THREAD_NAME = "skyrl-gym-env"  # of all threads: error messages must not depend on the thread
CLOSE_SECONDS = 2.0
MAX_FRAMES = 8
MAX_SLOW_LINES = 100  # per call that runs concurrently with others
MAX_LINE_DELAY_SECONDS = 1e-3  # a fifth of it on average
STANDARD_LIBRARY = sysconfig.get_path("stdlib")


@dataclass(frozen=True, slots=True)
class EnvCall:
    """A function without arguments, or with `is_async` a coroutine function without arguments."""

    function: Callable[[], Any]
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call: its value, its error, or where it hangs."""

    value: Any = None
    error: BaseException | None = None
    hangs_at: str | None = None  # the current lines of the stack, the innermost last
    seconds: float = 0.0


class Executor:
    """Threads and an event loop that live for the duration of a `with` block."""

    def __init__(self, n_threads: int, limit_s: float) -> None:
        """Run up to `n_threads` blocking calls concurrently. With two or more, consecutive calls change threads."""
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
        """End the threads. Calls that hang, or refuse to be cancelled, are left behind."""
        for worker in self._threads:
            worker.end()
        self._loop.end()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in (*(idle.thread for idle in self._idle), self._loop.thread):
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    @property
    def was_stopped(self) -> bool:
        """True if a call stopped the event loop and this executor restarted it."""
        return self._loop.was_stopped

    def run(self, calls: Sequence[EnvCall]) -> list[CallResult]:
        """Make calls concurrently and return their results. All together have `limit_s` seconds.

        If several run in threads, they are slowed down so that they overlap. Do not call this again after a call hangs.
        """
        assert not self.is_stuck
        threads = [None if call.is_async else self._idle.popleft() for call in calls]
        start = threading.Barrier(max(1, len(threads) - threads.count(None)))
        running = [
            self._loop.start(call.function) if thread is None else thread.start(call.function, start, seed)
            for seed, (call, thread) in enumerate(zip(calls, threads, strict=True))
        ]
        deadline = time.monotonic() + self.limit_s
        results = [
            call.wait(deadline) or CallResult(hangs_at=call.format_stack(), seconds=self.limit_s) for call in running
        ]
        for thread, result in zip(threads, results, strict=True):
            if result.hangs_at is not None:
                self.is_stuck = True
            elif thread is not None:
                self._idle.append(thread)
        return results


@dataclass(frozen=True, slots=True)
class _RunningCall:
    """A call that has been started."""

    future: Future[CallResult]
    stack: Callable[[], traceback.StackSummary]

    def wait(self, deadline: float) -> CallResult | None:
        """Wait for the result until `deadline`, a time of `time.monotonic`. Return None if the call still runs."""
        try:
            return self.future.result(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return None

    def format_stack(self) -> str:
        """Format the innermost frames of the call, one per line."""
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
        self.thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
        self.thread.start()

    def start(self, function: Callable[[], Any], barrier: threading.Barrier, seed: int) -> _RunningCall:
        """Call `function` once all threads have reached `barrier`. Slow it down if there are several."""
        future: Future[CallResult] = Future()

        def make() -> None:
            barrier.wait()
            future.set_result(_result(function if barrier.parties == 1 else partial(_call_slowly, function, seed)))

        self._queue.put(make)
        return _RunningCall(future, lambda: _thread_stack(self.thread))

    def end(self) -> None:
        """End the thread when it is idle."""
        self._queue.put(None)

    def _work(self) -> None:
        while (make := self._queue.get()) is not None:
            make()
            del make  # or the environment stays alive until the next call


class _Loop:
    """An event loop in a thread. It keeps running between calls."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_over = threading.Event()
        self.was_stopped = False  # by an environment
        self.thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self.thread.start()

    def start(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> _RunningCall:
        """Await the coroutine that `function` returns."""
        coroutine = _async_result(function)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)

        def stack() -> traceback.StackSummary:
            is_busy = asyncio.current_task(self._loop) is not None  # one task blocks all others
            if is_busy:
                return _thread_stack(self.thread)
            frames = ((frame, frame.f_lineno) for frame in _suspended_frames(coroutine))
            return traceback.StackSummary.extract(frames)

        return _RunningCall(future, stack)

    def end(self) -> None:
        """End the thread once the remaining tasks are cancelled."""
        self._is_over.set()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop):  # cancels the remaining tasks at its end
            self._loop.run_forever()
            while not self._is_over.is_set():
                self.was_stopped = True
                self._loop.run_forever()


def _result(function: Callable[[], Any]) -> CallResult:
    started = time.monotonic()
    try:
        return CallResult(value=function(), seconds=time.monotonic() - started)
    except BaseException as error:  # noqa: BLE001, the boundary of a call; SystemExit must not end the check
        return CallResult(error=error, seconds=time.monotonic() - started)


async def _async_result(function: Callable[[], Coroutine[Any, Any, Any]]) -> CallResult:
    started = time.monotonic()
    try:
        return CallResult(value=await function(), seconds=time.monotonic() - started)
    except BaseException as error:  # noqa: BLE001, as above
        return CallResult(error=error, seconds=time.monotonic() - started)


def _call_slowly(function: Callable[[], Any], seed: int) -> Any:
    """Call a function with a pause before each of the first `MAX_SLOW_LINES` lines that run outside Python's library.

    Without pauses, most calls end before Python switches threads, after 5 ms. In weeks of training, some calls overlap.
    """
    n_left = MAX_SLOW_LINES
    own_random = random.Random(seed)  # with equal pauses, threads would run in lockstep and never interfere

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal n_left
        file = frame.f_code.co_filename
        if file.startswith("<frozen") or (file.startswith(STANDARD_LIBRARY) and "site-packages" not in file):
            return None
        if event == "line":
            n_left -= 1
            if not n_left:
                sys.settrace(None)
            time.sleep(MAX_LINE_DELAY_SECONDS * own_random.random() ** 4)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(before)


def _thread_stack(thread: threading.Thread) -> traceback.StackSummary:
    """Return the current stack of a thread; empty if the thread has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()


def _suspended_frames(coroutine: Any) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine, the outermost first."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
