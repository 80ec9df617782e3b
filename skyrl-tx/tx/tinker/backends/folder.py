"""Files of a saved model other than its weights. All backends share the format and read each other's folders."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from tx.models.config import AdapterConfig
from tx.tinker.types import UserError

T = TypeVar("T")

SETTINGS, WHOLE_MODEL, OPTIMIZER = "training.json", "model.safetensors", "optimizer.safetensors"
N_STEPS = "n_steps"


def save_settings(folder: Path, lora: AdapterConfig) -> None:
    """Write the adapter's settings."""
    (folder / SETTINGS).write_text(json.dumps({"lora": asdict(lora)}), encoding="utf-8")


def load_settings(folder: Path) -> AdapterConfig:
    """Read the adapter's settings."""
    return AdapterConfig(**json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["lora"])


def optimizer_file(folder: Path) -> Path:
    """Return the optimizer state's file.

    Raises:
        UserError: there is none.
    """
    file = folder / OPTIMIZER
    if not file.is_file():
        raise UserError("the checkpoint has no optimizer state; load it without the optimizer")
    return file


def named_moments(
    first: Mapping[str, T], second: Mapping[str, T], n_steps: T, master_weights: Mapping[str, T] | None = None
) -> dict[str, T]:
    """Merge the optimizer state into one mapping: both moments, step count, and float32 weights of bfloat16 models."""
    kinds = {"first": first, "second": second, "wide": master_weights or {}}
    return {f"{kind}.{path}": tensor for kind, tensors in kinds.items() for path, tensor in tensors.items()} | {
        N_STEPS: n_steps
    }


def moments_of(tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T], T, dict[str, T] | None]:
    """Split a mapping created by `named_moments`."""
    first, second, master_weights = (
        {path.removeprefix(prefix): tensor for path, tensor in tensors.items() if path.startswith(prefix)}
        for prefix in ("first.", "second.", "wide.")
    )
    return first, second, tensors[N_STEPS], master_weights or None
