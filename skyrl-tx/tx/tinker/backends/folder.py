"""What the folder of a model has beside its weights: the same for every backend, so that each reads the others'."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from tx.models.config import LoraConfig
from tx.tinker.types import UserError

T = TypeVar("T")

SETTINGS, WHOLE_MODEL, OPTIMIZER = "training.json", "model.safetensors", "optimizer.safetensors"
N_STEPS = "n_steps"


def save_settings(folder: Path, lora: LoraConfig) -> None:
    """Write what the model covers."""
    (folder / SETTINGS).write_text(json.dumps({"lora": asdict(lora)}), encoding="utf-8")


def load_settings(folder: Path) -> LoraConfig:
    """What `save_settings` wrote."""
    return LoraConfig(**json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["lora"])


def optimizer_file(folder: Path) -> Path:
    """Where the state of the optimizer is.

    Raises:
        UserError: there is none.
    """
    file = folder / OPTIMIZER
    if not file.is_file():
        raise UserError("the checkpoint has no state of an optimizer; load it without")
    return file


def named_moments(
    first: Mapping[str, T], second: Mapping[str, T], n_steps: T, wide: Mapping[str, T] | None = None
) -> dict[str, T]:
    """Both moments by the names of their weights, the steps, and the weights in float32 where the model's are not."""
    kinds = {"first": first, "second": second, "wide": wide or {}}
    return {f"{kind}.{path}": one for kind, some in kinds.items() for path, one in some.items()} | {N_STEPS: n_steps}


def moments_of(tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T], T, dict[str, T] | None]:
    """The inverse of `named_moments`."""
    first, second, wide = (
        {path.removeprefix(prefix): one for path, one in tensors.items() if path.startswith(prefix)}
        for prefix in ("first.", "second.", "wide.")
    )
    return first, second, tensors[N_STEPS], wide or None
