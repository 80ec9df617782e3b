"""A model's weight files, and a fingerprint that does not need to read all bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tx.models.config import ModelError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BYTES_OF_TENSOR = 1024


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
            raise ModelError(f"{folder} lacks {missing[0]}, which {INDEX} names, and {len(missing) - 1} more")
        return [folder / name for name in names]
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []
