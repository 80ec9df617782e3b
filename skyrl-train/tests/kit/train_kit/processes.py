"""Processes that tests start and kill."""

import asyncio
import atexit
import functools
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

from train_kit.zygote import Zygote

TRAIN_FOLDER = Path(__file__).parents[3]
"""The folder skyrl-train, from which `python -m examples.…` runs."""


TEMPORARY_FOLDER = tempfile.gettempdir()
"""Folder of the zygote, which outlives a test that changes TMPDIR."""


@functools.cache
def zygote() -> Zygote:
    """Return the zygote of this pytest process, which is started at the first call."""
    folder = tempfile.TemporaryDirectory(prefix="zygote-", dir=TEMPORARY_FOLDER)
    started = Zygote(Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(started.close)
    return started


def python() -> str:
    """Return a Python that has imported PyTorch, for tests of programs: `subprocess.run([python(), "-m", …])`.

    Use `sys.executable` instead if the subject of the test is start-up, or the tree of processes.
    """
    return sys.executable if "TEST_REAL_PYTHON" in os.environ else str(zygote().python)


@contextmanager
def forked_multiprocessing() -> Iterator[None]:
    """Start the processes of `multiprocessing` through the zygote; killing one kills its program, SIGSTOP does not."""
    if "TEST_REAL_PYTHON" not in os.environ:
        zygote().serve_multiprocessing()
    yield
    multiprocessing.set_executable(sys.executable)


def run_python(*arguments: str, status: int = 0, **options: Any) -> str:
    """Run `python …` in the folder skyrl-train; assert its exit status, and return its output and messages."""
    options = {"cwd": TRAIN_FOLDER, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
    finished = subprocess.run([python(), *arguments], check=False, **options)
    assert finished.returncode == status, finished.stdout
    return str(finished.stdout)


def run_torchrun(*arguments: str, n_ranks: int = 2, status: int = 0, **variables: str) -> str:
    """Run `torchrun … arguments` with ranks on this machine; assert its exit status, and return its output."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": python()} | variables
    return run_python(*torchrun, *arguments, status=status, env=environment)


def write_commands(folder: Path) -> Path:
    """Write `python`, `python3` and `skyrl` into a folder for the PATH of shell scripts, and return the folder.

    They start programs as `python()` does. Only code after `-c`, which is short in scripts, gets a new interpreter: it
    starts faster than the zygote forks.
    """
    choose = f'[ "$1" != -c ] || exec {sys.executable} "$@"\nexec {python()} "$@"\n'
    lines = {"python": choose, "python3": choose, "skyrl": f'exec {python()} -m skyrl_train.compat.cli "$@"\n'}
    for name, line in lines.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}")
        (folder / name).chmod(0o755)
    return folder


def find_descendants(name: str, pid: int | None = None) -> Iterator[psutil.Process]:
    """Yield the running descendants of a process (this one if None) with `name` in their name or command line.

    They include the processes of a Ray cluster that it started.
    """
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # zombies among them
            if name in " ".join([process.name(), *process.cmdline()]):
                yield process


def kill_descendant(name: str) -> None:
    """Kill a descendant of this process with `name` in its command line."""
    next(find_descendants(name)).kill()


@contextmanager
def killing(name: str, folder: Path, n_steps: int = 1) -> Iterator[None]:
    """Kill a descendant with `name` in its command line once the run in `folder` has logged `n_steps` steps.

    A run of short steps may end before that; let a callback call `kill_descendant` there.
    """
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


def wait_until(is_true: Callable[[], object], timeout_s: float = 200) -> None:
    """Poll a condition; fail if it does not hold in time."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@asynccontextmanager
async def no_leaks(folder: Path | None = None) -> AsyncIterator[None]:
    """Check that the block leaves no processes, threads, tasks, descriptors or files in `folder`, after a moment.

    Threads of the event loop's default executor may stay.
    """
    resource_tracker.ensure_running()  # it lives as long as this process

    def resources() -> list[set[Any]]:
        threads = {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}
        counts = {("task", n) for n in range(len(asyncio.all_tasks()))}
        counts |= {("descriptor", n) for n in range(psutil.Process().num_fds())}
        files = set() if folder is None else set(folder.iterdir())
        return [set(psutil.Process().children(recursive=True)), threads, counts, files]

    before = resources()
    yield
    deadline = time.monotonic() + 20
    while any(leaked := [now - earlier for now, earlier in zip(resources(), before, strict=True)]):
        assert time.monotonic() < deadline, leaked
        gc.collect()
        await asyncio.sleep(0.05)
