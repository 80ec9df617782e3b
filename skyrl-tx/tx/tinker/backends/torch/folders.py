"""Save and load weights and optimizers in the JAX backend's layout: each backend reads the other's folders.

Adapters use peft's layout, so vLLM and Hugging Face can read them. Whole models use their Hugging Face names. The
optimizer's tensors have the weights' names with the prefixes `first.` and `second.`, and `wide.` for the float32
weights of bfloat16 models.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from skyrl_train.media.processing import has_vision
from tx.models import peft
from tx.models.config import AdapterConfig
from tx.tinker.backends.base import Save
from tx.tinker.backends.folder import (
    OPTIMIZER,
    WHOLE_MODEL,
    load_settings,
    moments_of,
    named_moments,
    optimizer_file,
    save_settings,
)
from tx.tinker.backends.torch.adam import TorchMoments
from tx.tinker.backends.torch.experts import TorchFactors
from tx.tinker.backends.torch.weights import Weights, covered_matrices, new_weights


def capture_weights(weights: Weights, lora: AdapterConfig, base_model: str) -> Save:
    """Copy the trained weights to the CPU.

    Return a function that writes them and the adapter's settings to a folder.
    """
    tensors = _name_tensors(weights, weights.trained)

    def save(folder: Path) -> None:
        if weights.adapter is not None:
            matrices = covered_matrices(weights.model, lora)
            expert_ranks = {matrix.name: matrix.rank(lora) for matrix in matrices if matrix.n_experts}
            # peft matches names by suffix, and the image encoder has e.g. a q_proj too
            uses_full_paths = has_vision(weights.model.config)
            modules = list(dict.fromkeys(m.path if uses_full_paths and not m.n_experts else m.name for m in matrices))
            peft.write_config(folder, lora, base_model, modules, expert_ranks)
        save_file(tensors, folder / _file(lora), metadata={"format": "pt"})
        save_settings(folder, lora)

    return save


def load_weights(folder: Path, model: PreTrainedModel) -> tuple[AdapterConfig, Weights]:
    """Load trainable weights and their settings from a folder.

    Raises:
        ValueError: a tensor is missing, or does not have the shape that `model` needs.
    """
    lora = load_settings(folder)
    weights = new_weights(model, lora, seed=0)
    values = _values(weights, load_file(folder / _file(lora)))
    with torch.no_grad():
        for tensor, value in zip(weights.trained, values, strict=True):
            tensor.copy_(value)
    return lora, weights


def capture_moments(weights: Weights, moments: TorchMoments) -> Save:
    """Copy the optimizer state. Return a function that writes the copy."""
    first, second = (_name_tensors(weights, values) for values in (moments.first, moments.second))
    master_weights = None if moments.master_weights is None else _name_tensors(weights, moments.master_weights)
    named = named_moments(first, second, torch.tensor(moments.n_steps, dtype=torch.int32), master_weights)
    return lambda folder: save_file(named, folder / OPTIMIZER)


def load_moments(folder: Path, weights: Weights) -> TorchMoments:
    """Load the optimizer state from a folder.

    Raises:
        UserError: there is none.
    """
    first, second, n_steps, master_weights = moments_of(load_file(optimizer_file(folder)))
    return TorchMoments(
        _values(weights, first),
        _values(weights, second),
        int(n_steps),
        None if master_weights is None else _values(weights, master_weights),
    )


def _file(lora: AdapterConfig) -> str:
    return peft.WEIGHTS if lora.rank else WHOLE_MODEL


def _name_tensors(weights: Weights, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name the trained tensors' values as in files, and copy them to the CPU."""
    if weights.adapter is not None:
        tensors = dict(_name_factors(weights.adapter, values))
    else:
        names = [name for name, _ in weights.model.named_parameters()]
        tensors = revert_weight_conversion(weights.model, dict(zip(names, values, strict=True)))
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _name_factors(
    adapter: Mapping[str, TorchFactors], values: Sequence[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield factors by their names in files. Stacked experts.gate_proj become experts.0.gate_proj, …"""
    for path, a, b in zip(adapter, values[::2], values[1::2], strict=True):
        for which, value in enumerate((a, b)):
            if value.ndim == 2:
                yield peft.factor_names(path)[which], value
                continue
            layer, _, name = path.rpartition(".")
            for number, part in enumerate(value):
                yield peft.factor_names(f"{layer}.{number}.{name}")[which], part


def _values(weights: Weights, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Order named tensors like the trained tensors: the inverse of `_name_tensors`."""
    if weights.adapter is None:
        return _model_values(weights.model, tensors)
    values = [torch.zeros_like(tensor, device="cpu") for tensor in weights.trained]
    for name, part in _name_factors(weights.adapter, values):
        part.copy_(peft.get_tensor(tensors, name, tuple(part.shape)))
    return values


def _model_values(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Order a whole model's tensors, in float32. transformers knows their names and fusion in files."""
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
