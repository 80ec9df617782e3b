"""Files of runs, written without the trainer."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from skyrl_gym.images import EncodedImage


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Write one JSON value per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_metrics(path: Path, rows: Sequence[Mapping[str, float]]) -> None:
    """Write the metrics of steps 0, 1, …, with null for NaN and infinite numbers."""
    write_rows(
        path,
        [
            {"step": step} | {name: value if math.isfinite(value) else None for name, value in row.items()}
            for step, row in enumerate(rows)
        ],
    )


def picture(seed: int, width: int = 48, height: int = 32) -> Image.Image:
    """Return an image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8))


def write_images(folder: Path, images: Iterable[EncodedImage]) -> None:
    """Write the files of images."""
    folder.mkdir(parents=True, exist_ok=True)
    for image in images:
        (folder / image.file_name).write_bytes(image.content)
