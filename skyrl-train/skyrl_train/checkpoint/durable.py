"""Files and folders that survive a power cut: their content and their names are synced to disk."""

from __future__ import annotations

import os
import re
from pathlib import Path

MAX_SUBPATH = 300
"""Bytes that the path of a run's file may have below one of the run's folders."""


def find_folder_fault(folder: str) -> str | None:
    """Return why files cannot be written below a folder, which need not exist; None if they can. Creates nothing."""
    if "\0" in folder:
        return "it contains a NUL character"
    try:
        os.fsencode(folder)
    except UnicodeEncodeError:
        return "it contains half of a surrogate pair"
    path = Path(folder).absolute()
    parent = next(ancestor for ancestor in (path, *path.parents) if os.path.lexists(ancestor))
    if not parent.is_dir():
        return f"{parent} is {'a broken link' if parent.is_symlink() else 'not a folder'}"
    missing = path.relative_to(parent).parts
    if variable := re.search(r"\$(\w+|\{\w+\})", "/".join(missing)):
        return f"the environment variable {variable[0]} is not set"
    if missing and folder.startswith("~"):
        return f"there is no user {folder.partition('/')[0].removeprefix('~')}"
    max_name, max_path = os.pathconf(parent, "PC_NAME_MAX"), os.pathconf(parent, "PC_PATH_MAX")
    if any(len(os.fsencode(name)) > max_name for name in missing):
        return f"names of files have at most {max_name} bytes"
    if len(os.fsencode(path)) + MAX_SUBPATH > max_path:
        return f"paths have at most {max_path:,} bytes, and those of files in it have up to {MAX_SUBPATH} more"
    if os.statvfs(parent).f_flag & os.ST_RDONLY:
        return f"{parent} is on a read-only file system"
    return None if os.access(parent, os.W_OK | os.X_OK) else f"{parent} is read-only for this user"


def disk_error(error: BaseException) -> BaseException:
    """Return the OSError behind an error of PyTorch's file writer, or the error itself if there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return error if cause is None else cause


def make_folder(folder: Path) -> None:
    """Create a folder and the missing ones above it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file. The old file is complete until the new one is."""
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
