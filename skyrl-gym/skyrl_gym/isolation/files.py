"""A program's files: their size, and their removal."""

import itertools
import os
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress

BLOCK_BYTES = 512  # the unit of st_blocks
MAX_FILES = 4096  # per program
TOO_MANY_BYTES = 1 << 62


def file_bytes(folder: str, processes: Iterable[int], max_files: int = MAX_FILES, skipped: Collection[str] = ()) -> int:
    """Return the space taken by the files in `folder` and by unnamed files that a process has open.

    Paths in `skipped` do not count. Return infinity for more than `max_files` files, a folder that cannot be read, or a
    path that is too long.
    """
    n_bytes = n_files = 0
    pending = [folder]
    while pending:
        try:
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.path in skipped:
                        continue
                    n_files += 1
                    if n_files > max_files or len(entry.path) > os.pathconf(folder, "PC_PATH_MAX") // 2:
                        return TOO_MANY_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    with suppress(FileNotFoundError):
                        n_bytes += entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
        except OSError:  # e.g. no permission
            return TOO_MANY_BYTES
    return n_bytes + unnamed_bytes(processes)


def clear_folder(folder: str) -> None:
    """Empty a folder that no process uses, whatever the depth and permissions of its contents.

    Subfolders are moved to the top instead of visited by path, because deep paths may be too long to open."""
    names = (f"{folder}/moved-{i}" for i in itertools.count())
    os.chmod(folder, 0o700)
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if not inner.is_dir(follow_symlinks=False):
                    os.unlink(inner.path)
                    continue
                os.chmod(inner.path, 0o700)
                os.rename(inner.path, next(name for name in names if not os.path.lexists(name)))
            os.rmdir(entry.path)


def unnamed_bytes(processes: Iterable[int]) -> int:
    """Return the space of deleted files that processes still have open. Files of `memfd_create` are memory."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in processes:
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{fd}")
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        sizes[status.st_dev, status.st_ino] = status.st_blocks * BLOCK_BYTES
    return sum(sizes.values())
