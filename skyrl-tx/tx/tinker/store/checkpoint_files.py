"""Checkpoint files: `tinker://<model>/<kind>/<name>` is a folder under `checkpoints_base`.

A folder is filled under a temporary name and then renamed, so it is complete or absent, even after a kill.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from tx.tinker.config import TxConfig
from tx.tinker.db_models import CheckpointKind
from tx.tinker.types import TinkerError, UserError

SCHEME = "tinker://"
MODEL_ID = re.compile(r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,10}", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}", re.ASCII)
GIB = 1 << 30
ABANDONED_SEC = 3600
"""Seconds after which no process can still be writing to a temporary folder."""
SNAPSHOTS = "snapshots"
UNFINISHED, REPLACED, DELETED = ".unfinished-", ".replaced-", ".deleted-"
"""Prefixes of temporary folders: not yet complete, replaced by a new version, and about to be deleted."""


class TinkerPath(NamedTuple):
    """The parts of a checkpoint path."""

    model_id: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"


def parse_path(path: str) -> TinkerPath:
    """Split a path into its parts.

    Raises:
        UserError: the path is invalid.
    """
    parts = path.removeprefix(SCHEME).split("/")
    is_valid = path.startswith(SCHEME) and len(parts) == 3
    if not is_valid or parts[1] not in list(CheckpointKind) or not MODEL_ID.fullmatch(parts[0]):
        kinds = "|".join(CheckpointKind)
        raise UserError(f"{path[:300]!r} is not a checkpoint path; use tinker://<model id>/{kinds}/<name>")
    model_id, kind, name = parts
    return TinkerPath(model_id, CheckpointKind(kind), check_name(name))


def check_name(name: str) -> str:
    """Validate a checkpoint name and return it. It is also the name of the checkpoint's folder.

    Raises:
        UserError: the name has invalid characters, starts with a dot, or is too long.
    """
    if not NAME.fullmatch(name):
        raise UserError(
            f"{name[:300]!r} cannot name a checkpoint; use 1 to 255 letters, digits, '.', '_' or '-', with no '.' first"
        )
    return name


def checkpoint_folder(config: TxConfig, path: str) -> Path:
    """Return the folder of a checkpoint: `<base>/<model id with '_' for ':'>/<kind>/<name>`.

    Raises:
        UserError: the path is invalid.
    """
    parts = parse_path(path)
    return config.checkpoints_base / parts.model_id.replace(":", "_") / parts.kind / parts.name


def snapshot_folder(config: TxConfig, sampling_session_id: str) -> Path:
    """Return the folder of an unnamed sampler: `<base>/snapshots/<session>/<number>`."""
    session_id, _, number = sampling_session_id.rpartition(":sample:")
    return snapshots_folder(config, session_id) / number


def snapshots_folder(config: TxConfig, session_id: str) -> Path:
    """Return the folder of all unnamed samplers of a session."""
    return config.checkpoints_base / SNAPSHOTS / session_id


def check_space(config: TxConfig, n_bytes: int) -> None:
    """Check that `n_bytes` fit on the disk of `checkpoints_base`, with `min_free_bytes` to spare.

    Raises:
        TinkerError: they do not fit.
    """
    existing = next(path for path in (config.checkpoints_base, *config.checkpoints_base.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < n_bytes + config.min_free_bytes:
        raise TinkerError(
            f"the disk of {config.checkpoints_base} has {free / GIB:.1f} GiB free, and {n_bytes / GIB:.1f} GiB are to "
            f"be written; {config.min_free_bytes / GIB:.1f} GiB must stay free (--min-free-bytes). Delete checkpoints, "
            "or end sessions, which deletes their unnamed samplers"
        )


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Fill a folder atomically: until `write` has succeeded, a previous version stays in place.

    Raises:
        OSError: the folder cannot be written.
    """
    rename_into_place(fill_folder(folder, write), folder)


def fill_folder(folder: Path, write: Callable[[Path], object]) -> Path:
    """Fill and sync a temporary folder. Return it for `rename_into_place`.

    Names of new parent folders are synced too, outermost first.
    """
    unfinished = folder.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
    created = [path for path in folder.parents if not path.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    for path in reversed(created):
        _sync_path(path.parent)
    unfinished.mkdir()
    try:
        write(unfinished)
        for path in (*unfinished.rglob("*"), unfinished):
            _sync_path(path)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, SafetensorError):  # safetensors raises this on a full disk
            raise OSError(str(error)) from error
        raise
    return unfinished


def rename_into_place(complete: Path, folder: Path) -> None:
    """Rename a complete folder into place. After a kill in between, `restore_replaced` restores the old version."""
    aside = folder.with_name(f"{REPLACED}{secrets.token_hex(8)}")
    aside.mkdir()
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside / folder.name)
        complete.rename(folder)
    except BaseException:
        _restore_replaced(aside)
        shutil.rmtree(complete, ignore_errors=True)
        raise
    _sync_path(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def restore_replaced(base: Path) -> None:
    """Restore folders whose replacement was interrupted by a kill."""
    for aside in _temporary_folders(base, REPLACED):
        _restore_replaced(aside)


def _restore_replaced(aside: Path) -> None:
    for folder in aside.iterdir():
        if not aside.with_name(folder.name).exists():
            folder.rename(aside.with_name(folder.name))
    shutil.rmtree(aside, ignore_errors=True)


def _sync_path(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def delete_folder(folder: Path) -> None:
    """Delete a folder atomically, if it exists."""
    delete_aside(set_aside(folder))


def set_aside(folder: Path) -> Path | None:
    """Rename a folder away, so that `delete_aside` can delete it. Return None if it does not exist."""
    aside = folder.with_name(f"{DELETED}{secrets.token_hex(8)}")
    try:
        return folder.rename(aside)
    except FileNotFoundError:
        return None


def delete_aside(aside: Path | None) -> None:
    """Delete a folder that was renamed away."""
    if aside is not None:
        shutil.rmtree(aside)


def leftovers(base: Path) -> list[Path]:
    """Return temporary folders that a process is writing or deleting, or left behind when it was killed."""
    return _temporary_folders(base, UNFINISHED, DELETED)


def _temporary_folders(base: Path, *prefixes: str) -> list[Path]:
    found = (folder for pattern in ("*", "*/*", "*/*/*") for folder in base.glob(pattern))
    return [folder for folder in found if folder.name.startswith(prefixes)]


def write_times(folders: Iterable[Path]) -> dict[Path, int]:
    """Return the time of the last write to each folder, in nanoseconds. Missing folders are left out."""
    times = {}
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            times[folder] = folder.stat().st_mtime_ns
    return times
