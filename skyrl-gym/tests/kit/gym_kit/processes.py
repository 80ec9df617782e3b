"""Processes that tests start, workers that the package starts, and what both may leave behind."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

KIT = Path(__file__).parents[1]
SECONDS = 60.0
"""Time limit for operations that take less than a second on an idle machine."""


def run_python(
    code: str, *arguments: str, is_checked: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -c code arguments` with further environment variables; fail with its errors unless it succeeds."""
    path = os.pathsep.join(filter(None, [str(KIT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert not is_checked or done.returncode == 0, done.stderr
    return done


def attempt(function: Callable[..., object], *args: object) -> str:
    """Return the result of a call as text, or the name of its OSError."""
    try:
        return str(function(*args))
    except OSError as error:
        return type(error).__name__


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def wait_until(is_true: Callable[[], object]) -> None:
    """Poll a condition; fail if it does not hold within `SECONDS`."""
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def wait_until_async(is_true: Callable[[], object]) -> None:
    """Poll a condition without blocking the event loop; fail if it does not hold within `SECONDS`."""
    async with asyncio.timeout(SECONDS):
        while not is_true():
            await asyncio.sleep(0.01)


async def wait_for_no_tasks() -> None:
    await asyncio.sleep(0.01)  # a call from another thread starts its task a moment later
    await wait_until_async(lambda: asyncio.all_tasks() == {asyncio.current_task()})


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def kill(pids: Iterable[int]) -> None:
    """Kill processes and wait until they have ended.

    A child is a zombie as soon as its first thread has ended, while the others may still hold its connections.
    """
    pids = list(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in children().intersection(pids):
        with suppress(ChildProcessError):  # a grandchild, or another thread has reaped it
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    wait_until(lambda: not any(map(is_running, pids)))


def children() -> set[int]:
    """Return the processes that descend from this one."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def workers(module: str) -> set[int]:
    """Return the children of this process that run `module`, and its zombies that were workers of any module."""
    return {child.pid for child in psutil.Process().children() if _is_worker(child, module)}


def _is_worker(child: psutil.Process, module: str) -> bool:
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        if child.status() == psutil.STATUS_ZOMBIE:
            return os.getpgid(child.pid) == child.pid  # workers lead a group of their own
        return module in child.cmdline()
    return False


def count_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@contextmanager
def no_leaks() -> Iterator[None]:
    """Check that the block leaves no processes, threads or descriptors behind, after a moment to end them."""

    processes, threads, n_descriptors = children(), set(threading.enumerate()), count_descriptors()

    def leaks() -> tuple[set[int], set[threading.Thread], int]:
        return children() - processes, set(threading.enumerate()) - threads, max(0, count_descriptors() - n_descriptors)

    yield
    deadline = time.monotonic() + SECONDS / 2
    while any(leaked := leaks()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not any(leaked), leaked
