"""Waits of a run: who waits for what, since when. The watchdog reports stuck waits and ends those without a limit.

    with Wait(ENGINE, rollout, "generate"):
        await engine.generate(requests)

A wait enters a table of this process and leaves it, which takes a microsecond. The thread of a `Watchdog` reads the
table, so it also sees a blocked event loop. It warns of a wait that is stuck, and cancels one that exceeds its limit,
which then raises StalledError. If that does not end it, the watchdog ends the process.
"""

import asyncio
import faulthandler
import json
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from skyrl_report.run_folder import RunFolder
from skyrl_train.errors import StalledError

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""Seconds that a run has to end after a wait has reached its limit. Then the process ends."""

MAX_BACKOFF_S = 1800.0
"""Maximum number of seconds between two warnings about the same hang."""

LIVE_AFTER_S, LIVE_INTERVAL_S = 10.0, 5.0
"""`waits.json` lists waits of at least this age, and is written at most this often."""

LIMIT_KEY = "trainer.watchdog.limit_seconds"


@dataclass(slots=True, eq=False)
class Stage:
    """A reason to wait, such as the engine. Its waits share one object, which counts their progress."""

    name: str
    advice: str
    kind: Literal["own", "shared", "outer"] = "own"
    """`own`: each wait has its own cause. `shared`: all wait for one thing, so the end of one is progress of all.
    `outer`: the wait ends when others end. It is reported only if nothing else in the process moves, and has no limit.
    """
    ends_run: bool = True
    """True if the run cannot continue without the result. Otherwise only a trajectory becomes invalid."""
    limit_key: str = LIMIT_KEY  # of a limit that the owner enforces
    n_moves: int = 0
    longest_s: dict[str, float] = field(default_factory=dict)  # longest finished wait by detail, above a second

    def progress(self) -> None:
        """Record progress inside of a long wait, e.g. a sampled token of an engine."""
        self.n_moves += 1


ENVIRONMENT = Stage(
    "environment",
    "The environment, one of its tools or its grader does not return. The stacks show where. "
    "environment.skyrl_gym.isolation=process kills hanging calls",
    ends_run=False,
    limit_key="environment.skyrl_gym.call_timeout_seconds",
)
AGENT = Stage(
    "agent",
    "The agent has not returned. Read its log, and whether it waits for the model",
    ends_run=False,
    limit_key="generator.trajectory_timeout_seconds",
)
ENGINE = Stage(
    "engine",
    "The engine samples no tokens. Look at its log and its GPU. A request may be lost, or the engine paused",
    "shared",
    ends_run=False,
)
REWARD = Stage("reward function", "The reward function does not return. Give its requests a timeout", ends_run=False)
ENDPOINT = Stage("endpoint", "The process of the HTTP endpoint does not answer. Look at its output", ends_run=False)
RANK = Stage(
    "model",
    "If some ranks have answered, the others hang. If none has, they may wait for each other in a collective "
    "($SKYRL_WORKER_NCCL_TIMEOUT_IN_S). `kill -USR1` prints the stacks of a rank's process",
    "shared",
)
SYNC = Stage(
    "weight sync",
    "An engine does not pause, receive the weights or resume. Look at its log and at the network between both",
    limit_key="generator.weight_sync_timeout_seconds",
)
CHECKPOINT = Stage(
    "checkpoint",
    "The storage of trainer.ckpt_path does not respond. Check the disk or its network",
    limit_key="trainer.ckpt_timeout_seconds",
)
UPLOAD = Stage(
    "upload",
    "Remote storage is slow or does not respond. Files stay on this machine until they are uploaded",
    limit_key="trainer.remote_exit_timeout_seconds",
)
DATA = Stage("data", "The dataset does not return a row. Check the storage of data.train_data")
TRACKER = Stage("tracker", "A tracker in trainer.logger does not return. With wandb, export WANDB_MODE=offline")
SLOT = Stage("free slot", "All environments, agents or workers are busy. See what they wait for", "outer")
ROLLOUTS = Stage("rollouts", "The generator does not return. It reports no waits of its own", "outer")
CALLBACK = Stage("callback", "The callback does not return. See its stack", "outer")
RUN = Stage("run", "The program neither computes a step nor waits for one. See its stacks", "outer")

INNER_STAGES = (ENVIRONMENT, AGENT, ENGINE, REWARD, ENDPOINT, RANK, SYNC, CHECKPOINT, UPLOAD, DATA, TRACKER)
STAGES = (*INNER_STAGES, SLOT, ROLLOUTS, CALLBACK, RUN)

_open: set["Wait"] = set()
"""All waits of this process. Threads add to it and read it: these are single operations of the interpreter."""


class Wait:
    """A wait in progress. As a context, it covers the code that waits.

    `who` waits, and `detail` says for what, e.g. the method that was called. Both are only formatted for a report.
    `limit_s` is a limit that the code inside enforces. Without one, the watchdog's limit ends the wait.
    """

    __slots__ = ("_n_cancelling", "detail", "limit_s", "since", "stage", "stalled", "task", "who")

    def __init__(self, stage: Stage, who: object = "", detail: str = "", limit_s: float | None = None) -> None:
        self.stage, self.who, self.detail, self.limit_s = stage, who, detail, limit_s
        self.stalled: str | None = None

    def __enter__(self) -> None:
        try:
            self.task = asyncio.current_task()
        except RuntimeError:  # a thread without an event loop
            self.task = None
        self.since = time.monotonic()
        _open.add(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Raise StalledError if the watchdog has cancelled the wait."""
        _open.discard(self)
        stage = self.stage
        stage.n_moves += 1
        elapsed = time.monotonic() - self.since
        if elapsed > 1.0 and kind is None and elapsed > stage.longest_s.get(self.detail, 0.0):
            stage.longest_s[self.detail] = elapsed
        if self.stalled is not None and self.task is not None:
            is_ours = self.task.uncancel() <= self._n_cancelling  # no other cancellation is pending
            if is_ours and kind is asyncio.CancelledError:
                raise StalledError(self.stalled) from error

    def expire(self, limit_s: float) -> None:
        """Cancel the wait, whose age has reached `limit_s`. Called in the event loop of its task."""
        if self in _open and self.stalled is None and self.task is not None:
            self.stalled = describe_limit(self, limit_s)
            self._n_cancelling = self.task.cancelling()
            self.task.cancel()


def describe(wait: Wait) -> str:
    """Return who waits for what, e.g. "catch train-3-17-0-0, step"."""
    return ", ".join(filter(None, (str(wait.who), wait.detail))) or wait.stage.name


def describe_limit(wait: Wait, limit_s: float) -> str:
    """Return the message of the error that ends a wait."""
    return (
        f"{wait.stage.name} ({describe(wait)}): no answer for {LIMIT_KEY}={limit_s:g} s. {wait.stage.advice}. Raise "
        "the limit if it needs more time"
    )


class Watchdog:
    """A thread that watches the waits of this process while a run is in this context.

    It also prints them at once when the process receives SIGUSR1, unless the program has its own handler.
    """

    def __init__(self, folder: Path, warn_after_s: float | None, limit_s: float | None) -> None:
        """Watch a run with this folder. Warn of waits after `warn_after_s`, and end them after `limit_s`."""
        files = RunFolder(folder)
        self._live_file, self._stack_file = files.waits, files.stacks
        self.warn_after_s, self.limit_s = warn_after_s, limit_s
        self.interval_s = min([1.0, *(seconds / 5 for seconds in (warn_after_s, limit_s) if seconds is not None)])
        self._run = Wait(RUN)
        self._writer: threading.Thread | None = None  # a hanging disk must not stop the watchdog
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)

    def __enter__(self) -> None:
        self._started = self._moved_at = self._ended_at = time.monotonic()
        self._moves = dict.fromkeys(STAGES, (-1, self._started))  # number of moves of each stage, and its last time
        self._newest = self._next_warning = self._next_live = 0.0
        self._backoff_s = self.warn_after_s or 0.0
        self._is_ending, self._is_live = False, False
        self._run.__enter__()
        self._signal, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._has_signal = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        if self._has_signal:  # writes to the pipe even if no Python code can run in the main thread
            faulthandler.register(signal.SIGUSR1, self._wake, all_threads=False)
        self._is_closed = False
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        if self._has_signal:
            faulthandler.unregister(signal.SIGUSR1)
        os.write(self._wake, b"\0")
        self._thread.join()
        os.close(self._signal)
        os.close(self._wake)
        self._run.__exit__(None, None, None)
        if self._is_live and (self._writer is None or not self._writer.is_alive()):
            self._live_file.unlink(missing_ok=True)

    def _work(self) -> None:
        while True:
            is_asked = bool(select.select([self._signal], [], [], self.interval_s)[0])
            if is_asked:
                os.read(self._signal, 1 << 16)
            if self._is_closed:
                return
            try:
                self._check(time.monotonic(), is_asked)
            except Exception:
                logger.exception("The watchdog failed")

    def _check(self, now: float, is_asked: bool) -> None:
        waits = [wait for wait in list(_open) if wait.since >= self._started]
        self._observe(waits, now)
        if is_asked:
            logger.warning("Waits of this process:\n%s", self._format(waits, now, waits))
        old = [wait for wait in waits if now - wait.since >= self.interval_s]
        stuck = self._find_stuck(old, now, self._warning_age)
        if not stuck:
            self._next_warning, self._backoff_s = 0.0, self.warn_after_s or 0.0
        elif now >= self._next_warning:
            logger.warning("Nothing has moved for a long time:\n%s", self._format(stuck, now, waits))
            self._next_warning = now + self._backoff_s
            self._backoff_s = min(MAX_BACKOFF_S, 2 * self._backoff_s)
        if now >= self._next_live:
            self._next_live = now + LIVE_INTERVAL_S
            self._write_live(self._find_stuck(old, now, lambda _: LIVE_AFTER_S), now)
        self._enforce(old, now)

    def _observe(self, waits: list[Wait], now: float) -> None:
        """Note which stages have moved since the last check."""
        for stage, (n_moves, _) in self._moves.items():
            if stage.n_moves != n_moves:
                self._moves[stage], self._moved_at = (stage.n_moves, now), now
        newest = max((wait.since for wait in waits), default=0.0)
        if newest != self._newest:
            self._newest, self._moved_at = newest, now

    def _age(self, wait: Wait, now: float) -> float:
        """Return the seconds for which a wait has not moved."""
        kind = wait.stage.kind
        if kind == "own":
            return now - wait.since
        return now - max(wait.since, self._moves[wait.stage][1] if kind == "shared" else self._moved_at)

    def _warning_age(self, wait: Wait) -> float:
        """Return the age of a wait to warn of: longer than finished waits of its kind, but before its own limit."""
        if self.warn_after_s is None:
            return float("inf")
        age = max(self.warn_after_s, 1.5 * wait.stage.longest_s.get(wait.detail, 0.0))
        return age if wait.limit_s is None else min(age, max(self.interval_s, wait.limit_s / 2))

    def _find_stuck(self, waits: list[Wait], now: float, min_age: Callable[[Wait], float]) -> list[Wait]:
        """Return the waits of at least this age, oldest first. If there are only outer ones, return the innermost."""
        stuck = sorted((w for w in waits if self._age(w, now) >= min_age(w)), key=lambda w: w.since)
        return [wait for wait in stuck if wait.stage.kind != "outer"] or stuck[-1:]

    def _enforce(self, waits: list[Wait], now: float) -> None:
        """Cancel waits that have reached the limit. End the process if that does not help."""
        for wait in waits:
            age = self._age(wait, now)
            if self.limit_s is None or wait.stage.kind == "outer" or wait.limit_s is not None or age < self.limit_s:
                continue
            if wait.task is not None and wait.stalled is None:
                with suppress(RuntimeError):  # the loop has just been closed
                    wait.task.get_loop().call_soon_threadsafe(wait.expire, self.limit_s)
            if wait.stage.ends_run and not self._is_ending:
                self._is_ending, self._ended_at = True, now
            if age >= self.limit_s + GRACE_S:
                self._exit(f"{describe_limit(wait, self.limit_s)}, and it cannot be cancelled")
        has_limit = any(wait.limit_s is not None and now - wait.since < wait.limit_s for wait in waits)
        if self._is_ending and not has_limit and now - max(self._ended_at, self._moved_at) >= GRACE_S:
            self._exit("the run did not end after a wait had reached its limit")

    def _exit(self, text: str) -> None:
        """End the process. Threads that hang would keep it alive, and a complete checkpoint stays complete."""
        text = f"{text}. The process ends; rerun the command to resume from the last complete checkpoint"
        logger.critical("%s", text)
        with suppress(OSError):
            os.write(2, f"error: {text}\n{format_stacks(_loops(_open))}\n".encode())
        time.sleep(0.2)  # train.log is written in the background
        os._exit(StalledError.exit_status)

    def _format(self, waits: list[Wait], now: float, all_waits: list[Wait]) -> str:
        """Return a line per stage, and where the stacks are. Write these to the run folder."""
        lines = [self._format_stage(stage, group, now) for stage, group in _by_stage(waits)] or ["  none"]
        stacks = format_stacks(_loops(all_waits))
        if self._write(self._stack_file, f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{stacks}\n"):
            lines.append(f"  Stacks of all threads and tasks: {self._stack_file}")
        else:
            lines.append(f"{self._stack_file.parent} does not respond. Stacks of all threads and tasks:\n{stacks}")
        return "\n".join(lines)

    def _format_stage(self, stage: Stage, waits: list[Wait], now: float) -> str:
        oldest = waits[0]
        limit_s, key = (self.limit_s, LIMIT_KEY) if oldest.limit_s is None else (oldest.limit_s, stage.limit_key)
        limit = "" if limit_s is None or stage.kind == "outer" else f" It ends after {limit_s:g} s ({key})."
        started = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - oldest.since)))
        return (
            f"  {stage.name}: {len(waits)} waiting, the longest for {now - oldest.since:.0f} s since {started}: "
            f"{describe(oldest)}. {stage.advice}.{limit}"
        )

    def _write_live(self, waits: list[Wait], now: float) -> None:
        """Write old waits to `waits.json`, or remove the file if there are none any more."""
        if not waits and not self._is_live:
            return
        self._is_live = bool(waits)
        wall = time.time()
        stages = [
            {
                "stage": stage.name,
                "count": len(group),
                "oldest": {
                    "who": str(group[0].who),
                    "detail": group[0].detail,
                    "since": wall - (now - group[0].since),
                    "seconds": round(now - group[0].since, 1),
                },
                "limit_seconds": group[0].limit_s or (None if stage.kind == "outer" else self.limit_s),
                "advice": stage.advice,
            }
            for stage, group in _by_stage(waits)
        ]
        self._write(
            self._live_file, json.dumps({"time": wall, "pid": os.getpid(), "waits": stages}) if stages else None
        )

    def _write(self, path: Path, text: str | None) -> bool:
        """Replace a file in another thread, or remove it. Return False if the last write still hangs."""
        if self._writer is not None:
            self._writer.join(1.0)
            if self._writer.is_alive():
                return False
        self._writer = threading.Thread(target=_replace, args=(path, text), name="watchdog-file", daemon=True)
        self._writer.start()
        return True


def _replace(path: Path, text: str | None) -> None:
    with suppress(OSError):  # the log has the same information
        if text is None:
            path.unlink(missing_ok=True)
            return
        partial = path.with_suffix(".tmp")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def _by_stage(waits: Iterable[Wait]) -> list[tuple[Stage, list[Wait]]]:
    """Group waits by stage, the oldest first."""
    groups: dict[Stage, list[Wait]] = {}
    for wait in sorted(waits, key=lambda wait: wait.since):
        groups.setdefault(wait.stage, []).append(wait)
    return list(groups.items())


def _loops(waits: Iterable[Wait]) -> set[asyncio.AbstractEventLoop]:
    return {wait.task.get_loop() for wait in list(waits) if wait.task is not None}


def format_stacks(loops: Iterable[asyncio.AbstractEventLoop]) -> str:
    """Return the stack of each thread, and of each task the chain of awaits. Equal chains are counted."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            parts.append(f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    for loop in loops:
        chains = Counter(_await_chain(task) for task in asyncio.all_tasks(loop))
        parts += [f"{n} x task: {chain}" for chain, n in chains.most_common()]
    return "\n".join(parts)


def _await_chain(task: asyncio.Task[Any]) -> str:
    """Return where a task waits, from the outermost call to the innermost."""
    calls: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        kind = next((kind for kind in ("cr", "ag", "gi") if getattr(awaited, f"{kind}_frame", None)), None)
        if kind is None:
            break  # a future
        frame = getattr(awaited, f"{kind}_frame")
        calls.append(f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return " > ".join(calls) or repr(task)
