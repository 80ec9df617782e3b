"""Weights and optimizers from and to folders, in the layout of the backend on JAX: each reads what the other wrote.

An adapter is in the layout of peft, which vLLM and Hugging Face read too; a whole model has its Hugging Face names. The
optimizer's tensors have the names of the weights, after `first.` and `second.`; and after `wide.` for the weights in
float32, where the model's are not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tx.models import peft
from tx.models.config import LoraConfig
from tx.tinker.backends.folder import (
    OPTIMIZER,
    WHOLE_MODEL,
    load_settings,
    moments_of,
    named_moments,
    optimizer_file,
    save_settings,
)
from tx.tinker.backends.torch.adam import Moments
from tx.tinker.backends.torch.experts import Factors
from tx.tinker.backends.torch.weights import Weights, covered, new_weights


def save_weights(folder: Path, weights: Weights, lora: LoraConfig, base_model: str) -> None:
    """Write weights and settings into a folder."""
    if weights.adapter is not None:
        chosen = covered(weights.model, lora)
        expert_ranks = {place.name: place.rank(lora) for place in chosen if place.n_experts}
        peft.write_config(folder, lora, base_model, list(dict.fromkeys(place.name for place in chosen)), expert_ranks)
    save_file(_named(weights, weights.trained), folder / _file(lora), metadata={"format": "pt"})
    save_settings(folder, lora)


def load_weights(folder: Path, model: PreTrainedModel) -> tuple[LoraConfig, Weights]:
    """The weights in a folder, ready to be trained, and what they cover.

    Raises:
        ValueError: a tensor is missing, or has another shape than `model` asks for.
    """
    lora = load_settings(folder)
    weights = new_weights(model, lora, seed=0)
    values = _values(weights, load_file(folder / _file(lora)))
    with torch.no_grad():
        for tensor, value in zip(weights.trained, values, strict=True):
            tensor.copy_(value)
    return lora, weights


def save_moments(folder: Path, weights: Weights, moments: Moments) -> None:
    """Write the state of an optimizer into a folder."""
    first, second = (_named(weights, values) for values in (moments.first, moments.second))
    wide = None if moments.wide is None else _named(weights, moments.wide)
    n_steps = torch.tensor(moments.n_steps, dtype=torch.int32)
    save_file(named_moments(first, second, n_steps, wide), folder / OPTIMIZER)


def load_moments(folder: Path, weights: Weights) -> Moments:
    """The state of the optimizer in a folder.

    Raises:
        UserError: there is none.
    """
    first, second, n_steps, wide = moments_of(load_file(optimizer_file(folder)))
    return Moments(
        _values(weights, first),
        _values(weights, second),
        int(n_steps),
        None if wide is None else _values(weights, wide),
    )


def _file(lora: LoraConfig) -> str:
    return peft.WEIGHTS if lora.rank else WHOLE_MODEL


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
        for which, value in enumerate((a, b)):
            for name, part in _parts(path, value):
                yield peft.factor_names(name)[which], part


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
        part.copy_(peft.checked(tensors, name, tuple(part.shape)))
    return values


def _model_values(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of a whole model, in float32: transformers knows how its parameters are named, and cut, in files."""
    loaded, report = type(model).from_pretrained(  # type: ignore[misc]
        None,
        config=copy.deepcopy(model.config),
        state_dict=dict(tensors),
        dtype=torch.float32,
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):  # type: ignore[has-type]
        raise ValueError(f"the checkpoint has no tensor {missing[0]}")
    return list(loaded.parameters())  # type: ignore[has-type]
