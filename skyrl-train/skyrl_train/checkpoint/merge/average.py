"""Average models: the weighted mean of their weights."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from skyrl_train.checkpoint.merge.comparison import MergeReport, compare, load_model, probe
from skyrl_train.checkpoint.model_folder import (
    DType,
    NamedTensors,
    OpenModel,
    copy_settings,
    new_folder,
    open_model,
    output_dtype,
    write_model,
)
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.models.lora import merged_buffers
from skyrl_train.types.specs import Role


def average_models(
    sources: Sequence[str], target: Path, weights: Sequence[float] | None = None, dtype: DType = "auto"
) -> MergeReport:
    """Write the weighted mean of models of the same architecture into a new folder, with the first model's settings.

    Args:
        sources: two or more folders or Hub names.
        target: the folder to write.
        weights: one weight per model, summing to 1. Defaults to equal weights.
        dtype: dtype of the merged weights. Defaults to the first model's.

    Raises:
        ConfigError: `target` exists, the weights do not add up to 1, or the models have different tensors.
        CheckpointError: the average equals the first model, or the result cannot be written or has wrong logits.
    """
    if len(sources) < 2:
        raise ConfigError(f"an average needs two or more models, but got {len(sources)}; add another")
    shares = list(weights or [1 / len(sources)] * len(sources))
    if len(shares) != len(sources) or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise ConfigError(
            f"got {len(shares)} weights (sum {sum(shares):g}) for {len(sources)} models; pass one weight per model, "
            "summing to 1"
        )
    models = [open_model(source) for source in sources]
    first = models[0]
    shapes, *others = ({spec.name: spec.shape for spec in model.specs} for model in models)
    for source, found in zip(sources[1:], others, strict=True):
        if different := [name for name in shapes | found if shapes.get(name) != found.get(name)]:
            name = different[0]
            raise ConfigError(
                f"{name} has shape {shapes.get(name, 'none')} in {sources[0]}, but {found.get(name, 'none')} in "
                f"{source}; average models of the same architecture"
            )
    architectures = json.loads((first.folder / "config.json").read_text(encoding="utf-8")).get("architectures") or [""]
    roles: Mapping[str, Role] = {"ForTokenClassification": "critic", "ForSequenceClassification": "reward"}
    role: Role = next((role for suffix, role in roles.items() if architectures[0].endswith(suffix)), "policy")
    changed: list[str] = []

    @torch.no_grad()
    def probe_sources(dtype: torch.dtype) -> torch.Tensor:
        mean = load_model(first.folder, dtype, role)
        parameters = _averaged_tensors(mean)
        is_stored = parameters.keys() <= {spec.name for spec in first.specs}  # False if transformers fuses experts
        for parameter in parameters.values():
            parameter.mul_(shares[0])
        for share, model in zip(shares[1:], models[1:], strict=True):
            others = {} if is_stored else _averaged_tensors(load_model(model.folder, dtype, role))
            for name, parameter in parameters.items():
                parameter.add_((model.read(name) if is_stored else others[name]).to(dtype), alpha=share)
            others.clear()  # before the next model is loaded
        return probe(mean)

    with new_folder(target) as partial:
        copy_settings([first.folder], partial)
        write_model(partial, first.specs, _average(models, shares, dtype, changed), dtype)
        if not changed:
            raise CheckpointError(
                f"the average of {', '.join(sources)} is identical to {sources[0]}; use other models or weights"
            )
        gap = compare(partial, probe_sources, role)
    return MergeReport(target, len(first.specs), len(changed), gap)


def _averaged_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that are averaged: parameters and floating-point buffers."""
    buffers = merged_buffers(model)
    return dict(model.named_parameters()) | {name: one for name, one in buffers.items() if one.is_floating_point()}


def _average(models: Sequence[OpenModel], shares: Sequence[float], dtype: DType, changed: list[str]) -> NamedTensors:
    """Yield the weighted means of the models' tensors. Append names that differ from the first model to `changed`."""
    for spec in models[0].specs:
        mean = models[0].read(spec.name)
        if spec.dtype.is_floating_point:
            before = mean.to(output_dtype(spec, dtype))
            total = torch.zeros(spec.shape)
            for share, model in zip(shares, models, strict=True):
                total += share * model.read(spec.name).float()
            mean = total.to(before.dtype)
            changed += [] if torch.equal(mean, before) else [spec.name]
        yield spec.name, mean
