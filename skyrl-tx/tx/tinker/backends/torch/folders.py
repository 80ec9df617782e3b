"""Weights and optimizers from and to folders, in the layout of the backend on JAX: each reads what the other wrote.

An adapter is in the layout of peft, which vLLM and Hugging Face read too; a whole model has its Hugging Face names. The
optimizer's tensors have the names of the weights, after `first.` and `second.`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tx.models.config import LoraConfig
from tx.tinker.backends.torch.adam import Moments
from tx.tinker.backends.torch.experts import Factors
from tx.tinker.backends.torch.weights import Weights, covered, new_weights
from tx.tinker.types import UserError

SETTINGS, OPTIMIZER, MODEL = "training.json", "optimizer.safetensors", "model.safetensors"
CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def save_weights(folder: Path, weights: Weights, lora: LoraConfig, base_model: str) -> None:
    """Write weights and settings into a folder."""
    if weights.adapter is not None:
        told = _peft_config(weights, lora, base_model)
        (folder / CONFIG).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    file = MODEL if weights.adapter is None else ADAPTER
    save_file(_named(weights, weights.trained), folder / file, metadata={"format": "pt"})
    (folder / SETTINGS).write_text(json.dumps({"lora": asdict(lora)}), encoding="utf-8")


def load_weights(folder: Path, model: PreTrainedModel) -> tuple[LoraConfig, Weights]:
    """The weights in a folder, ready to be trained, and what they cover.

    Raises:
        ValueError: a tensor is missing, or has another shape than `model` asks for.
    """
    lora = LoraConfig(**json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["lora"])
    weights = new_weights(model, lora, seed=0)
    values = _values(weights, load_file(folder / (ADAPTER if lora.rank else MODEL)))
    with torch.no_grad():
        for tensor, value in zip(weights.trained, values, strict=True):
            tensor.copy_(value)
    return lora, weights


def save_moments(folder: Path, weights: Weights, moments: Moments) -> None:
    """Write the state of an optimizer into a folder."""
    tensors = {
        f"{name}.{path}": tensor
        for name, values in (("first", moments.first), ("second", moments.second))
        for path, tensor in _named(weights, values).items()
    }
    save_file(tensors | {"n_steps": torch.tensor(moments.n_steps, dtype=torch.int32)}, folder / OPTIMIZER)


def load_moments(folder: Path, weights: Weights) -> Moments:
    """The state of the optimizer in a folder.

    Raises:
        UserError: there is none.
    """
    if not (folder / OPTIMIZER).is_file():
        raise UserError("the checkpoint has no state of an optimizer; load it without")
    tensors = load_file(folder / OPTIMIZER)
    first, second = (
        _values(weights, {path.removeprefix(name): one for path, one in tensors.items() if path.startswith(name)})
        for name in ("first.", "second.")
    )
    return Moments(first, second, int(tensors["n_steps"]))


def _named(weights: Weights, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values of the trained tensors by the names that they have in files; copies in the memory of the CPU."""
    if weights.adapter is not None:
        named = dict(_named_factors(weights.adapter, values))
    else:
        names = [name for name, _ in weights.model.named_parameters()]
        named = revert_weight_conversion(weights.model, dict(zip(names, values, strict=True)))
    return {name: one.detach().to("cpu", copy=True).contiguous() for name, one in named.items()}


def _named_factors(
    adapter: Mapping[str, Factors], values: Sequence[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    for path, a, b in zip(adapter, values[::2], values[1::2], strict=True):
        for kind, value in (("lora_A", a), ("lora_B", b)):
            for name, part in _parts(path, value):
                yield f"{PREFIX}{name}.{kind}.weight", part


def _parts(path: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A matrix, or those of the experts, which have a number each: …experts.gate_proj is …experts.0.gate_proj, …"""
    if value.ndim == 2:
        return [(path, value)]
    layer, _, name = path.rpartition(".")
    return [(f"{layer}.{number}.{name}", one) for number, one in enumerate(value)]


def _values(weights: Weights, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of `_named`."""
    if weights.adapter is None:
        return _model_values(weights.model, tensors)
    values = [torch.zeros_like(one, device="cpu") for one in weights.trained]
    for name, part in _named_factors(weights.adapter, values):
        if name not in tensors:
            raise ValueError(f"the adapter has no tensor {name}")
        if tensors[name].shape != part.shape:
            raise ValueError(f"{name} has the shape {tuple(tensors[name].shape)}, and not {tuple(part.shape)}")
        part.copy_(tensors[name])
    return values


def _model_values(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of a whole model: transformers knows how its parameters are named, and cut, in files."""
    loaded, report = type(model).from_pretrained(  # type: ignore[misc]
        None, config=copy.deepcopy(model.config), state_dict=dict(tensors), dtype=model.dtype, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):  # type: ignore[has-type]
        raise ValueError(f"the checkpoint has no tensor {missing[0]}")
    return list(loaded.parameters())  # type: ignore[has-type]


def _peft_config(weights: Weights, lora: LoraConfig, base_model: str) -> dict[str, Any]:
    chosen = covered(weights.model, lora)
    ranks = {place.path.rpartition(".")[2]: place.rank(lora) for place in chosen if place.n_experts}
    told: dict[str, Any] = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": list(dict.fromkeys(place.path.rpartition(".")[2] for place in chosen)),
        "task_type": "CAUSAL_LM",
    }
    if any(rank != lora.rank for rank in ranks.values()):
        told["rank_pattern"] = {rf".*\.experts\..*{name}": rank for name, rank in ranks.items()}
        told["alpha_pattern"] = {rf".*\.experts\..*{name}": lora.scale * rank for name, rank in ranks.items()}
    return told
