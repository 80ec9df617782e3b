"""Processes and threads that workspaces must not leave behind."""

import itertools
import os
import threading

import psutil
from train_kit.processes import wait_until

_NUMBERS = itertools.count()


def unique_sleep() -> str:
    """Return a command that sleeps for minutes and that nobody else runs, so that its processes can be found."""
    return f"sleep {4700 + next(_NUMBERS)}.{os.getpid():07}"


def find_pids(command: str) -> list[int]:
    """Return the processes of this machine with these arguments."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if " ".join(p.info["cmdline"] or ()) == command]


def wait_for_end(*commands: str) -> None:
    wait_until(lambda: not any(map(find_pids, commands)), timeout_s=30)


def workspace_threads() -> list[threading.Thread]:
    """Return the threads that start, use or close workspaces."""
    return [thread for thread in threading.enumerate() if thread.name == "workspace"]
