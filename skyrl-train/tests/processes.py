"""Processes that tests kill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import psutil


def find_descendants(name: str, pid: int | None = None) -> Iterator[psutil.Process]:
    """Yield the running descendants of a process (this one if None) with `name` in their name or command line.

    They include the processes of a Ray cluster that it started.
    """
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # zombies among them
            if name in " ".join([process.name(), *process.cmdline()]):
                yield process
