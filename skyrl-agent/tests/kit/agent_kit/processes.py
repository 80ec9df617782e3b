"""Processes and threads that workspaces must not leave behind."""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import suppress
from pathlib import Path

from train_kit.processes import wait_until

_NUMBERS = itertools.count()


def unique_sleep() -> str:
    """Return a command that sleeps for minutes and that nobody else runs, so that its processes can be found."""
    return f"sleep {4700 + next(_NUMBERS)}.{os.getpid():07}"


def find_pids(command: str) -> list[int]:
    """Return the processes of this machine with these arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if path.read_bytes().replace(b"\0", b" ").strip() == command.encode():
                found.append(int(path.parent.name))
    return found


def wait_for_end(*commands: str) -> None:
    """Wait until no process has these arguments."""
    wait_until(lambda: not any(map(find_pids, commands)), timeout_s=30)


def workspace_threads() -> list[threading.Thread]:
    """Return the threads that start, use or close workspaces."""
    return [thread for thread in threading.enumerate() if thread.name == "workspace"]
