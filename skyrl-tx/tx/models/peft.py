"""File layout of peft adapters. vLLM and Hugging Face also read it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tx.models.config import AdapterConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def factor_names(path: str) -> tuple[str, str]:
    """Return the names of A (rank, in) and B (out, rank) for a matrix, e.g. ``model.layers.0.mlp.up_proj``."""
    return f"base_model.model.{path}.lora_A.weight", f"base_model.model.{path}.lora_B.weight"


def write_config(
    folder: Path, lora: AdapterConfig, base_model: str, modules: Sequence[str], expert_ranks: Mapping[str, int]
) -> None:
    """Write the adapter's configuration: it covers `modules`, and experts have their own ranks.

    peft takes the first pattern that matches. With transformers 5, gate and up are one fused matrix.
    """
    settings: dict[str, Any] = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": list(modules),
        "task_type": "CAUSAL_LM",
    }
    if any(rank != lora.rank for rank in expert_ranks.values()):
        ranks = dict(expert_ranks)
        if ranks.keys() >= {"gate_proj", "up_proj"}:
            ranks = {"gate_up_proj": ranks["gate_proj"] + ranks["up_proj"], **ranks}
        settings["rank_pattern"] = {rf".*\.experts\..*{name}": rank for name, rank in ranks.items()}
        settings["alpha_pattern"] = {pattern: lora.scale * rank for pattern, rank in settings["rank_pattern"].items()}
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def get_tensor(tensors: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Any:
    """Return a tensor by name.

    Raises:
        ValueError: it is missing, or has the wrong shape.
    """
    if name not in tensors:
        raise ValueError(f"the adapter has no tensor {name}")
    if tuple(tensors[name].shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensors[name].shape)} instead of {shape}")
    return tensors[name]
