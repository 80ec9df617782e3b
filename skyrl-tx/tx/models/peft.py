"""The layout in which peft keeps an adapter, which vLLM and Hugging Face read too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tx.models.config import LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def factor_names(path: str) -> tuple[str, str]:
    """The names of A (rank, in) and B (out, rank) of the matrix at a path, e.g. ``model.layers.0.mlp.up_proj``."""
    return f"base_model.model.{path}.lora_A.weight", f"base_model.model.{path}.lora_B.weight"


def write_config(
    folder: Path, lora: LoraConfig, base_model: str, modules: Sequence[str], expert_ranks: Mapping[str, int]
) -> None:
    """Write what is beside the weights: `modules` are covered, those of experts with ranks of their own."""
    told: dict[str, Any] = {
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
        told["rank_pattern"] = {rf".*\.experts\..*{name}": rank for name, rank in _fused(expert_ranks).items()}
        told["alpha_pattern"] = {pattern: lora.scale * rank for pattern, rank in told["rank_pattern"].items()}
    (folder / CONFIG).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _fused(ranks: Mapping[str, int]) -> Mapping[str, int]:
    """With that of gate and up as one matrix, as peft has them with transformers 5. It takes the first that matches."""
    if not ranks.keys() >= {"gate_proj", "up_proj"}:
        return ranks
    return {"gate_up_proj": ranks["gate_proj"] + ranks["up_proj"], **ranks}


def checked(tensors: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Any:
    """A tensor by its name.

    Raises:
        ValueError: it is missing, or has another shape.
    """
    if name not in tensors:
        raise ValueError(f"the adapter has no tensor {name}")
    if tuple(tensors[name].shape) != shape:
        raise ValueError(f"{name} has the shape {tuple(tensors[name].shape)}, and not {shape}")
    return tensors[name]
