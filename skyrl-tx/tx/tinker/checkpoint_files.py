"""Where the files of a checkpoint are: `tinker://<model>/<kind>/<name>` is a folder under `checkpoints_base`."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from tx.tinker.config import TxConfig
from tx.tinker.db_models import CheckpointKind
from tx.tinker.types import UserError

SCHEME = "tinker://"
MODEL_ID = re.compile(r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,10}", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}", re.ASCII)
SECONDS_UNTOUCHED = 3600
"""After which nobody can still be writing there."""
SNAPSHOTS = "snapshots"
UNFINISHED, REPLACED, DELETED = ".unfinished-", ".replaced-", ".deleted-"
"""How folders begin that are not there yet, those that hold what others are to replace, and those about to go."""


class TinkerPath(NamedTuple):
    """A path in its parts."""

    model_id: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"


def parse_path(path: str) -> TinkerPath:
    """The parts of a path.

    Raises:
        UserError: it is none.
    """
    model_id, kind, name = _three_parts(path)
    if kind not in list(CheckpointKind) or not MODEL_ID.fullmatch(model_id):
        raise UserError(_no_path(path))
    return TinkerPath(model_id, CheckpointKind(kind), checked_name(name))


def _three_parts(path: str) -> list[str]:
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3:
        raise UserError(_no_path(path))
    return parts


def _no_path(path: str) -> str:
    kinds = "|".join(CheckpointKind)
    return f"{path[:300]!r} is no path of a checkpoint; these are tinker://<model id>/{kinds}/<name>"


def checked_name(name: str) -> str:
    """The name of a checkpoint, which is also that of its folder.

    Raises:
        UserError: it has other characters, begins with a dot, or is too long.
    """
    if not NAME.fullmatch(name):
        raise UserError(
            f"{name[:300]!r} cannot name a checkpoint; use 1 to 255 letters, digits, '.', '_' or '-', with no '.' first"
        )
    return name


def checkpoint_folder(config: TxConfig, path: str) -> Path:
    """Where its files are, or will be: `<base>/<model id with '_' for ':'>/<kind>/<name>`.

    Raises:
        UserError: it is no path.
    """
    parts = parse_path(path)
    return config.checkpoints_base / parts.model_id.replace(":", "_") / parts.kind / parts.name


def snapshot_folder(config: TxConfig, sampling_session_id: str) -> Path:
    """Where the weights of a sampling session are that have no name: `<base>/snapshots/<session>/<number>`."""
    session_id, _, number = sampling_session_id.rpartition(":sample:")
    return snapshots_folder(config, session_id) / number


def snapshots_folder(config: TxConfig, session_id: str) -> Path:
    """Where all weights without a name are of a client's session."""
    return config.checkpoints_base / SNAPSHOTS / session_id


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Have a folder filled. Whatever happens, it is complete or absent, and an earlier one is there until this one is.

    Raises:
        OSError: it could not be written.
    """
    give_name(fill_folder(folder, write), folder)


def fill_folder(folder: Path, write: Callable[[Path], object]) -> Path:
    """The first half of that: one that is complete, and does not have its name yet."""
    unfinished = folder.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
    _make_durable(folder.parent)
    unfinished.mkdir()
    try:
        write(unfinished)
        _sync(unfinished)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, SafetensorError):  # what it raises when the disk is full
            raise OSError(str(error)) from error
        raise
    return unfinished


def give_name(complete: Path, folder: Path) -> None:
    """The second half. `put_back` is to be called after a kill in between."""
    aside = folder.with_name(f"{REPLACED}{secrets.token_hex(8)}")
    aside.mkdir()
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside / folder.name)
        complete.rename(folder)
    except BaseException:
        _put_back(aside)
        shutil.rmtree(complete, ignore_errors=True)
        raise
    _sync_one(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def put_back(base: Path) -> None:
    """Folders whose names a process was about to give to others, when it was killed, get them again."""
    for aside in _hidden(base, REPLACED):
        _put_back(aside)


def _put_back(aside: Path) -> None:
    for folder in aside.iterdir():
        if not aside.with_name(folder.name).exists():
            folder.rename(aside.with_name(folder.name))
    shutil.rmtree(aside, ignore_errors=True)


def _make_durable(folder: Path) -> None:
    """Create a folder and its missing parents, and sync their names to disk, outermost first."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(created):
        _sync_one(path.parent)


def _sync(folder: Path) -> None:
    """So that it is on the disk before its name is."""
    for path in (*folder.rglob("*"), folder):
        _sync_one(path)


def _sync_one(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def delete_folder(folder: Path) -> None:
    """Delete a folder, all at once for who looks at it; none is no error."""
    delete_aside(set_aside(folder))


def set_aside(folder: Path) -> Path | None:
    """Take the name from a folder, and no more: what `delete_aside` deletes; None without one."""
    aside = folder.with_name(f"{DELETED}{secrets.token_hex(8)}")
    try:
        return folder.rename(aside)
    except FileNotFoundError:
        return None


def delete_aside(aside: Path | None) -> None:
    """Delete what has no name any more."""
    if aside is not None:
        shutil.rmtree(aside)


def delete_leftovers(base: Path) -> None:
    """Delete what a process has not finished writing or deleting when it was killed."""
    for folder in _hidden(base, UNFINISHED, DELETED):
        if seconds_untouched(folder) > SECONDS_UNTOUCHED:
            shutil.rmtree(folder, ignore_errors=True)


def _hidden(base: Path, *prefixes: str) -> list[Path]:
    found = (folder for pattern in ("*", "*/*", "*/*/*") for folder in base.glob(pattern))
    return [folder for folder in found if folder.name.startswith(prefixes)]


def seconds_untouched(folder: Path) -> float:
    """How long ago it was written to; 0 for one that is gone."""
    try:
        return time.time() - folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0
