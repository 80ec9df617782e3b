"""Files and folders that survive a power cut, because content and names are synced to disk, and locks of folders."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from skyrl_train.errors import ConfigError

LOCK_FILE = ".lock"

DISK_ERRORS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS),
        *(errno.EPERM, errno.EACCES),  # also from an expired Kerberos ticket or a quota tool
        *(errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT),  # network file systems
    }
)
"""Error numbers of a file system that is full, read-only, protected, broken or gone."""


def disk_error(error: BaseException) -> BaseException:
    """Return the OSError behind an error from PyTorch's file writer, if any, or the error itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return error if cause is None else cause


def to_bytes(state: dict[str, Any]) -> bytes:
    """Serialize a state to the content of a file for `torch.load`."""
    content = BytesIO()
    torch.save(state, content)
    return content.getvalue()


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file. After a crash, it has either the old or the new content.

    The new content is on disk before the rename makes it visible, and the rename is on disk before this returns.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def sync_tree(folder: Path) -> None:
    """Sync a folder and everything in it."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Sync the content of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def folder_lock(folder: Path, fix: str, run: Path | None = None) -> Iterator[None]:
    """Lock a folder for this process within the context. If the process dies, the system releases the lock.

    `run` is the folder of the run that uses the locked folder, if it is a different folder.

    Raises:
        ConfigError: another process holds the lock, or the lock file belongs to another user. The message names the
            holder's pid, host and run, and ends with `fix`.
    """
    make_folder(folder)
    lock = folder / LOCK_FILE
    if lock.exists() and not os.access(lock, os.W_OK):
        raise ConfigError(
            f"cannot write {lock} as this user, because {_holder(lock)} created it. Remove it if no run uses the "
            "folder, or give this run other folders."
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
