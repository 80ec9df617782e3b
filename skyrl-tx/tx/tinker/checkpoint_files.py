"""Where the files of a checkpoint are: `tinker://<model>/<kind>/<name>` is a folder under `checkpoints_base`."""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path
from typing import NamedTuple

from tx.tinker.config import TxConfig
from tx.tinker.db_models import CheckpointKind
from tx.tinker.types import UserError

SCHEME = "tinker://"
MODEL_ID = re.compile(r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,10}", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}", re.ASCII)
DELETED = ".deleted-"
"""How folders begin that are about to go."""


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


def delete_checkpoint_files(config: TxConfig, path: str) -> None:
    """Delete its files, all at once for who looks at the folder; none are no error."""
    folder = checkpoint_folder(config, path)
    aside = folder.with_name(f"{DELETED}{secrets.token_hex(8)}")
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside)
