"""Processes that tests start and kill."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from train_kit.zygote import Zygote


@functools.cache
def zygote() -> Zygote:
    """Return the zygote of this pytest process, which is started at the first call."""
    folder = tempfile.TemporaryDirectory(prefix="zygote-")
    started = Zygote(Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(started.close)
    return started


def python() -> str:
    """Return a Python that has imported PyTorch, for tests of programs: `subprocess.run([python(), "-m", …])`.

    Use `sys.executable` instead if the subject of the test is start-up, or the tree of processes.
    """
    return sys.executable if "TEST_REAL_PYTHON" in os.environ else str(zygote().python)


def find_descendants(name: str, pid: int | None = None) -> Iterator[psutil.Process]:
    """Yield the running descendants of a process (this one if None) with `name` in their name or command line.

    They include the processes of a Ray cluster that it started.
    """
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # zombies among them
            if name in " ".join([process.name(), *process.cmdline()]):
                yield process


@contextmanager
def killing(name: str, folder: Path, n_steps: int = 1) -> Iterator[None]:
    """Kill a descendant with `name` in its command line once the run in `folder` has logged `n_steps` steps."""
    log = folder / "metrics.jsonl"
    killed: list[int] = []

    def kill() -> None:
        while not log.exists() or len(log.read_text().splitlines()) <= n_steps:
            time.sleep(0.02)
        process = next(find_descendants(name))
        killed.append(process.pid)
        process.kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    yield
    killer.join(timeout=10)
    assert killed
