"""One process at a time writes into a folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_train.errors import ConfigError

LOCK_FILE = ".lock"


@contextmanager
def folder_lock(folder: Path, fix: str) -> Iterator[None]:
    """Hold the folder for as long as the context lasts. The system releases it when the process ends, however it ends.

    Raises:
        ConfigError: another process holds it; the message names its pid and host, and ends with `fix`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK_FILE, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder} is in use by {_holder(folder / LOCK_FILE)}; {fix}") from error
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        yield


def _holder(lock: Path) -> str:
    try:
        holder = json.loads(lock.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError):  # it is just writing its name
        return "another process"
