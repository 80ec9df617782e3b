"""A cgroup for a program's processes: the kernel counts their memory, including memory that no process has mapped.

This requires permission to create cgroups: root outside most containers, or cgroups that are delegated to users.
Versions 1 and 2 are supported.
"""

import fcntl
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

PREFIX = "skyrl-program-"
REMOVE_SECONDS = 5.0  # for a program's processes to exit
TRIAL_BYTES = 64 << 20
ABANDONED_SECONDS = 60.0
MAX_TASKS = 1024  # threads per program
_counter = itertools.count()


@contextmanager
def memory_cgroup(n_bytes: int) -> Iterator[tuple[int, int] | None]:
    """Create a cgroup with at most `n_bytes` of memory. Afterwards, kill its processes and remove it.

    Yield the file descriptors (join, events), or None if this process cannot create a cgroup. A process joins by
    writing "0" to `join`. `count_killed(events)` counts the processes killed for lack of memory.
    """
    parent = _parent()
    if parent is None:
        yield None
        return
    with _cgroup(parent, n_bytes) as cgroup:
        join = os.open(cgroup / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        events = os.open(cgroup / ("memory.events" if _is_v2(cgroup) else "memory.oom_control"), os.O_RDONLY)
        try:
            yield join, events
        finally:
            os.close(join)
            os.close(events)


def count_killed(events: int) -> int:
    """Count the processes that were killed for lack of memory."""
    lines = os.pread(events, 1 << 12, 0).decode("ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@cache
def _parent() -> Path | None:
    """Return a cgroup in which this process can create cgroups, or None."""
    for parent in _candidates():
        with suppress(OSError, subprocess.SubprocessError):
            _remove_abandoned(parent)
            with _cgroup(parent, TRIAL_BYTES) as cgroup:
                command = ["/bin/sh", "-c", 'echo 0 > "$1"', "sh", str(cgroup / "cgroup.procs")]
                subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=REMOVE_SECONDS)
            return parent
    return None


def _candidates() -> Iterator[Path]:
    """Yield cgroups whose children can have a memory limit: this process's cgroup and, in version 2, its parent.

    In version 2, a cgroup that contains processes has no such children.
    """
    for own in _own_cgroups():
        if not _is_v2(own):
            yield own
            continue
        for parent in (own, own.parent):
            controllers = parent / "cgroup.subtree_control"
            if controllers.exists() and "memory" in controllers.read_text(encoding="ascii").split():
                yield parent


def _own_cgroups() -> Iterator[Path]:
    """Yield this process's cgroups that may control memory."""
    with suppress(OSError):
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            hierarchy, controllers, path = line.split(":", 2)
            for _, _, _, root, mount, *options in mounts:
                kind, _, super_options = options[options.index("-") + 1 :][:3]
                is_v1 = kind == "cgroup" and "memory" in controllers.split(",") and "memory" in super_options.split(",")
                if is_v1 or (kind == "cgroup2" and hierarchy == "0"):
                    yield Path(mount) / os.path.relpath(path, root)


@contextmanager
def _cgroup(parent: Path, n_bytes: int) -> Iterator[Path]:
    cgroup = parent / f"{PREFIX}{os.getpid()}-{next(_counter)}"
    cgroup.mkdir()
    lock = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_v2(cgroup):
            limits = {"memory.max": n_bytes, "memory.swap.max": 0, "memory.oom.group": 1, "pids.max": MAX_TASKS}
        else:
            limits = {"memory.limit_in_bytes": n_bytes, "memory.memsw.limit_in_bytes": n_bytes}
        for position, (name, value) in enumerate(limits.items()):
            if position == 0 or (cgroup / name).exists():  # the others depend on the kernel's configuration
                (cgroup / name).write_text(str(value), encoding="ascii")
        yield cgroup
    finally:
        os.close(lock)
        _remove(cgroup)


def _remove(cgroup: Path) -> None:
    """Kill the processes of a cgroup and its nested program cgroups, then remove the cgroups."""
    for nested in cgroup.glob(f"{PREFIX}*"):
        _remove(nested)
    deadline = time.monotonic() + REMOVE_SECONDS
    while True:
        for pid in map(int, (cgroup / "cgroup.procs").read_text(encoding="ascii").split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            cgroup.rmdir()
        except OSError:  # e.g. a process is still exiting
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _remove_abandoned(parent: Path) -> None:
    """Remove empty cgroups whose creator was killed and therefore no longer holds the lock."""
    for cgroup in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(lock).st_mtime > ABANDONED_SECONDS:  # a new cgroup has no lock yet
                    cgroup.rmdir()
            finally:
                os.close(lock)


def _is_v2(cgroup: Path) -> bool:
    return (cgroup / "cgroup.controllers").exists()
