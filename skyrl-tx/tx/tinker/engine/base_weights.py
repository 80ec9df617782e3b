"""Bind a base model's name to its weights, by their fingerprint: adapters and checkpoints fit no other weights."""

import hashlib
import json
from pathlib import Path
from typing import Any

from sqlalchemy import Engine as Database
from sqlmodel import col, select

from tx.models.config import INDEX, SINGLE, ModelError
from tx.tinker.db_models import GONE, BaseWeights, Checkpoint, ClientSession, Model, SessionStatus
from tx.tinker.store.database import writing

BYTES_OF_TENSOR = 1024


def check_weights(database: Database, name: str, folder: Path) -> None:
    """Record and check the fingerprint of a base model's weights.

    Raises:
        ModelError: models were trained on different weights with this name.
    """
    found = fingerprint(folder)
    if found is None:
        return
    with writing(database) as db:
        known = db.get(BaseWeights, name)
        if known is not None and known.fingerprint != found:
            is_living = col(Model.status).not_in(GONE) | (col(ClientSession.status) == SessionStatus.ACTIVE)
            models = select(Model).join(ClientSession).where(Model.base_model == name, is_living)
            checkpoints = select(Checkpoint).where(Checkpoint.base_model == name)
            if any(db.exec(trained.limit(1)).first() for trained in (models, checkpoints)):
                raise ModelError(
                    f"{folder} has different weights from those that were served as {name} before, which models and "
                    "checkpoints of this server were trained on; use another --served-model-name, or serve the old "
                    "weights"
                )
        db.merge(BaseWeights(base_model=name, fingerprint=found))


def fingerprint(folder: Path) -> str | None:
    """Return a fingerprint of the model in a folder, from each tensor's name, type, shape and first bytes.

    It does not depend on how tensors are split into files, nor on other files. None if the folder has no safetensors.

    Raises:
        ModelError: a file is missing or invalid.
    """
    found: dict[str, list[Any]] = {}
    for path in _files(folder):
        try:
            found |= _read_header(path)
        except (ValueError, KeyError) as error:
            raise ModelError(f"{path} is not a valid safetensors file; check that the download is complete") from error
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest() if found else None


def _read_header(path: Path) -> dict[str, list[Any]]:
    """Read the header and first bytes of each tensor (https://huggingface.co/docs/safetensors describes the format)."""
    found = {}
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header = json.loads(file.read(start - 8))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            file.seek(start + begin)
            first = file.read(min(BYTES_OF_TENSOR, end - begin))
            found[name] = [tensor["dtype"], tensor["shape"], hashlib.sha256(first).hexdigest()]
    return found


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError) as error:
            raise ModelError(f"{folder / INDEX} is not a valid safetensors index: {error!r}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {missing[0]}, which {INDEX} lists, and {len(missing) - 1} more")
        return [folder / name for name in names]
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []
