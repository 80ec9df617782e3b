"""The files of a model's weights. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from pathlib import Path

INDEX, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


def list_weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that belong to the model in a folder, none if it has no such weights.

    Other files may lie beside them: Mistral's repositories have the weights a second time as
    `consolidated.safetensors`, with other names.
    """
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return sorted(folder / name for name in set(weight_map.values()))
    return [folder / SINGLE_FILE] if (folder / SINGLE_FILE).is_file() else []
