"""Which files a model's weights are in, and what tells them from another's without reading all of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tx.models.config import ModelError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BYTES_OF_TENSOR = 1024


def fingerprint(folder: Path) -> str:
    """Of the model in a folder: each tensor's name, type, shape and first bytes, however many files they are in.

    It does not depend on the rest of the folder. The format: https://huggingface.co/docs/safetensors

    Raises:
        ModelError: a file is missing.
    """
    found: dict[str, list[Any]] = {}
    for path in _files(folder):
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                begin, end = tensor["data_offsets"]
                file.seek(start + begin)
                first = file.read(min(BYTES_OF_TENSOR, end - begin))
                found[name] = [tensor["dtype"], tensor["shape"], hashlib.sha256(first).hexdigest()]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {', '.join(missing)}, which {INDEX} names")
        return [folder / name for name in names]
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []
