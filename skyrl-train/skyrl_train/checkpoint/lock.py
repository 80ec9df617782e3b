"""A lock that allows only one process to write into a folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_train.checkpoint.durable import make_folder
from skyrl_train.errors import ConfigError

LOCK_FILE = ".lock"


@contextmanager
def folder_lock(folder: Path, fix: str, run: Path | None = None) -> Iterator[None]:
    """Lock a folder for this process within the context. The system releases the lock if the process dies.

    `run` is the folder of the run that uses the locked folder, if it is a different folder.

    Raises:
        ConfigError: another process holds the lock, or the lock file belongs to another user. The message names the
            holder's pid, host and run, and ends with `fix`.
    """
    make_folder(folder)
    lock = folder / LOCK_FILE
    if lock.exists() and not os.access(lock, os.W_OK):
        raise ConfigError(
            f"{lock} cannot be written by this user; it was created by {_holder(lock)}: remove it if no run uses the "
            "folder, or give this run other folders"
        )
    with open(lock, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder} is in use by {_holder(lock)}; {fix}") from error
        file.truncate(0)
        holder = {"pid": os.getpid(), "host": socket.gethostname()}
        file.write(json.dumps(holder if run is None else holder | {"run": str(run.absolute())}))
        file.flush()
        yield


def _holder(lock: Path) -> str:
    try:
        holder = json.loads(lock.read_text(encoding="utf-8"))
        run = f", which runs {holder['run']}" if "run" in holder else ""
        return f"process {holder['pid']} on {holder['host']}{run}"
    except (OSError, ValueError, KeyError):  # the other process has not written its name yet
        return "another process"
