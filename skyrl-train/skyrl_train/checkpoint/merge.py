"""Merge models into one Hugging Face folder: an adapter into its base, a checkpoint of a run, an average of models.

Tensors are read, changed and written one at a time. Before the folder gets its name, the merged model is loaded and its
logits are compared with those of its sources. After an error, nothing is left.
"""

from __future__ import annotations

import gc
import math
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import peft
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from skyrl_train.checkpoint.manifest import MANIFEST, find_damage
from skyrl_train.checkpoint.model_folder import (
    DType,
    OpenModel,
    copy_settings,
    edit_config,
    new_folder,
    open_model,
    output_dtype,
    read_dtype,
    write_model,
)
from skyrl_train.checkpoint.store import CheckpointStore
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.models.lora import ADAPTER_FOLDER, BASE_CHECKSUM, read_changes, read_config
from skyrl_train.models.low_rank import MatrixChange
from skyrl_train.types.specs import TensorSpec
from skyrl_train.weight_sync.checksum import tensor_checksum

Role = Literal["policy", "critic", "reward"]

AUTO_CLASSES: Mapping[str, Any] = {
    "policy": AutoModelForCausalLM,
    "critic": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}

N_PROBED_TOKENS = 32
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-4, 1e-1  # relative to the norm of the logits, in float32 and in shorter types


@dataclass(frozen=True, slots=True)
class MergeReport:
    """A finished merge."""

    folder: Path
    n_tensors: int
    n_changed: int
    """Tensors that differ from those of the base, or of the first averaged model; 0 for a checkpoint of all weights."""
    logit_gap: float
    """Norm of the difference between the logits of the result and of its sources, relative to that of the latter."""


def merge_adapter(adapter: str, target: Path, base: str | None = None, dtype: DType = "auto") -> MergeReport:
    """Write the base model with an adapter merged into it, W + (alpha / rank) · B·A, into a new folder.

    Args:
        adapter: folder or Hub name of an adapter in peft's format.
        target: the folder to write.
        base: folder or Hub name of the base model; by default that in the adapter's settings.
        dtype: type of the merged weights; by default that of the base.

    Raises:
        ConfigError: `target` exists, or the adapter does not fit the base.
        CheckpointError: the adapter changes nothing, or the result cannot be written or has other logits.
    """
    return _merge_adapter(adapter, target, base, dtype)


def merge_checkpoint(
    source: Path, target: Path, base: str | None = None, dtype: DType = "auto", role: Role = "policy"
) -> MergeReport:
    """Write a model of a training checkpoint, saved by any number of ranks, into a new folder.

    An adapter is merged into its base, and copied to the subfolder `lora_adapter`.

    Args:
        source: a checkpoint `global_step_N`, the folder of one of its models, or a folder of checkpoints, whose newest
            is taken.
        target: the folder to write.
        base: base model of an adapter; by default the one that it was trained on.
        dtype: type of the merged weights; by default that of the checkpoint, or of the adapter's base.
        role: the model to merge, if the checkpoint has several.

    Raises:
        ConfigError: `target` exists.
        CheckpointError: the checkpoint is incomplete, or the result cannot be written or has other logits.
    """
    folder = _find_model(source, role)
    settings = folder / "huggingface"
    if (folder / ADAPTER_FOLDER).is_dir():
        return _merge_adapter(str(folder / ADAPTER_FOLDER), target, base, dtype, settings)
    if base is not None:
        raise ConfigError(f"--base={base} is not read, because {folder} holds all weights of its model; remove --base")
    auto_class = AUTO_CLASSES.get(folder.name, AutoModelForCausalLM)
    with torch.device("meta"):
        model = auto_class.from_config(AutoConfig.from_pretrained(settings))
    reader = dcp.FileSystemReader(folder)
    saved = {
        name.removeprefix("model.model."): item
        for name, item in reader.read_metadata().state_dict_metadata.items()
        if name.startswith("model.model.") and isinstance(item, TensorStorageMetadata)
    }
    names = [name for name, _ in model.named_parameters()]
    if missing := [name for name in names if name not in saved]:
        raise CheckpointError(
            f"{folder} has no {missing[0]} of a {type(model).__name__}; it belongs to another version"
        )
    specs = [TensorSpec(name, tuple(saved[name].size), saved[name].properties.dtype) for name in names]

    def read(spec: TensorSpec) -> torch.Tensor:
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        _load_sharded(folder, {f"model.model.{spec.name}": tensor})
        return tensor

    def probe_sources(dtype: torch.dtype) -> torch.Tensor:
        with no_init_weights():
            loaded = auto_class.from_config(model.config, dtype=specs[0].dtype).eval()
        tensors = {f"model.model.{name}": parameter.data for name, parameter in loaded.named_parameters()}
        _load_sharded(folder, tensors)
        return _probe(loaded.to(dtype))

    def rename(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return revert_weight_conversion(model, {name: tensor})

    shapes = (rename(spec.name, torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for spec in specs)
    files = [TensorSpec(name, tuple(one.shape), one.dtype) for named in shapes for name, one in named.items()]
    with new_folder(target) as partial:
        copy_settings([settings], partial)
        if auto_class is not AutoModelForCausalLM:
            edit_config(partial, architectures=[type(model).__name__])
        tensors = (item for spec in specs for item in rename(spec.name, read(spec)).items())
        write_model(partial, files, tensors, dtype)
        gap = _compare(partial, probe_sources, auto_class)
    return MergeReport(target, len(files), 0, gap)


def average_models(
    sources: Sequence[str], target: Path, weights: Sequence[float] | None = None, dtype: DType = "auto"
) -> MergeReport:
    """Write the weighted mean of models of the same architecture into a new folder, with the settings of the first.

    Args:
        sources: two or more folders or Hub names.
        target: the folder to write.
        weights: one for each model, with a sum of 1; by default equal.
        dtype: type of the merged weights; by default that of the first model.

    Raises:
        ConfigError: `target` exists, the weights do not add up to 1, or the models have different tensors.
        CheckpointError: all models are equal, or the result cannot be written or has other logits.
    """
    if len(sources) < 2:
        raise ConfigError(f"an average needs two or more models, and {len(sources)} was given; name another")
    shares = list(weights or [1 / len(sources)] * len(sources))
    if len(shares) != len(sources) or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise ConfigError(
            f"{len(shares)} weights with the sum {sum(shares):g} for {len(sources)} models; give one for each, and a "
            "sum of 1"
        )
    with ExitStack() as files:
        models = [files.enter_context(open_model(source)) for source in sources]
        first = models[0]
        _check_same_tensors(sources, models)
        tally = _Tally()

        @torch.no_grad()
        def probe_sources(dtype: torch.dtype) -> torch.Tensor:
            loaded = _load_model(first.folder, dtype)
            for name, parameter in loaded.named_parameters():
                parameter.mul_(shares[0])
                for share, model in zip(shares[1:], models[1:], strict=True):
                    parameter.add_(model.read(name).to(dtype), alpha=share)
            return _probe(loaded)

        with new_folder(target) as partial:
            copy_settings([first.folder], partial)
            write_model(partial, first.specs, _average(models, shares, dtype, tally), dtype)
            if not tally.n_changed:
                raise CheckpointError(
                    f"the average of {', '.join(sources)} has the weights of {sources[0]}; use models that differ"
                )
            gap = _compare(partial, probe_sources)
    return MergeReport(target, len(first.specs), tally.n_changed, gap)


def _merge_adapter(
    adapter: str, target: Path, base: str | None, dtype: DType, settings: Path | None = None
) -> MergeReport:
    """Merge an adapter; `settings` has the configuration and the tokenizer of its checkpoint, if it is from one."""
    config = read_config(adapter, f"the adapter {adapter}")
    if config.modules_to_save:
        raise ConfigError(
            f"the adapter {adapter} is that of a critic or a reward model, whose head it cannot hold; set "
            "lora.merge_on_export=true in its run to export the whole model"
        )
    base = base or config.base_model_name_or_path
    if not base:
        raise ConfigError(f"the adapter {adapter} does not name its base model; name it with --base")
    with open_model(base) as source:
        changes, parameters = read_changes(adapter, str(source.folder))
        if missing := sorted(changes.keys() - {spec.name for spec in source.specs}):
            raise ConfigError(f"{base} has no {missing[0]}, which the adapter {adapter} changes; name its base model")
        tally = _Tally()
        if settings is not None:
            tally.trained_dtype, tally.parameters = read_dtype(settings), parameters

        def probe_sources(dtype: torch.dtype) -> torch.Tensor:
            model: Any = peft.PeftModel.from_pretrained(_load_model(source.folder, dtype), adapter)
            return _probe(model.eval())

        with new_folder(target) as partial:
            copy_settings([source.folder, *([settings] if settings else [])], partial)
            write_model(partial, source.specs, _apply_changes(source, changes, dtype, tally), dtype)
            if settings is not None:
                _check_base(settings.parent, base, tally.checksum % 2**64)
                shutil.copytree(adapter, partial / ADAPTER_FOLDER)
            if not tally.n_changed:
                reason = "B·A is 0, or too small for the type" if config.lora_alpha else "its alpha is 0"
                raise CheckpointError(
                    f"merging the adapter {adapter} would change none of the {len(source.specs)} tensors of {base}: "
                    f"{reason}; use an adapter that was trained, or --dtype=float32"
                )
            gap = _compare(partial, probe_sources)
    return MergeReport(target, len(source.specs), tally.n_changed, gap)


@dataclass(slots=True)
class _Tally:
    """Facts about the tensors that were read and written."""

    n_changed: int = 0
    checksum: int = 0
    trained_dtype: torch.dtype | None = None
    """Type in which the checksum is computed; None for no checksum."""
    parameters: Collection[str] = ()
    """Names of the tensors in the checksum."""


def _apply_changes(
    source: OpenModel, changes: Mapping[str, MatrixChange], dtype: DType, tally: _Tally
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model, with the changes of an adapter."""
    for spec in source.specs:
        tensor = source.read(spec.name)
        if tally.trained_dtype is not None and spec.name in tally.parameters:
            tally.checksum += tensor_checksum(spec.name, tensor.to(tally.trained_dtype))
        if spec.name in changes:
            before = tensor.to(output_dtype(spec, dtype))
            tensor = changes[spec.name].apply(tensor.float()).to(before.dtype)
            tally.n_changed += not torch.equal(tensor, before)
        yield spec.name, tensor


def _average(
    models: Sequence[OpenModel], shares: Sequence[float], dtype: DType, tally: _Tally
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weighted means of the tensors of several models."""
    for spec in models[0].specs:
        mean = models[0].read(spec.name)
        if spec.dtype.is_floating_point:
            before = mean.to(output_dtype(spec, dtype))
            total = torch.zeros(spec.shape)
            for share, model in zip(shares, models, strict=True):
                total += share * model.read(spec.name).float()
            mean = total.to(before.dtype)
            tally.n_changed += not torch.equal(mean, before)
        yield spec.name, mean


def _check_same_tensors(sources: Sequence[str], models: Sequence[OpenModel]) -> None:
    """Raise ConfigError if models have different tensors."""
    first, *others = ({spec.name: spec.shape for spec in model.specs} for model in models)
    for source, shapes in zip(sources[1:], others, strict=True):
        if different := [name for name in first | shapes if first.get(name) != shapes.get(name)]:
            name = different[0]
            raise ConfigError(
                f"{name} has shape {first.get(name, 'none')} in {sources[0]}, but {shapes.get(name, 'none')} in "
                f"{source}; average models of the same architecture"
            )


def _find_model(source: Path, role: Role) -> Path:
    """Return the folder of one model in a checkpoint, after a comparison with the checksums of its files."""
    folder = source if (source / ".metadata").is_file() else source / role
    if source.is_dir() and not (folder / ".metadata").is_file() and (latest := CheckpointStore(source).latest()):
        folder = latest / role
    if not (folder / ".metadata").is_file():
        raise CheckpointError(
            f"{source} has no checkpoint of a {role}: there is no {folder / '.metadata'}; pass a folder such as "
            "outputs/<project>/<run>/ckpts/global_step_40"
        )
    step_folder = folder.parent
    if (step_folder / MANIFEST).is_file() and (damage := find_damage(step_folder)):
        raise CheckpointError(f"cannot merge {folder}: {', '.join(damage)}; use another checkpoint")
    return folder


def _load_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Load tensors of a checkpoint, in place, in this process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def _check_base(checkpoint: Path, base: str, checksum: int) -> None:
    """Raise CheckpointError if the adapter in a checkpoint was trained on other weights."""
    expected = (checkpoint / BASE_CHECKSUM).read_text(encoding="utf-8").strip()
    if expected != str(checksum):
        raise CheckpointError(
            f"the adapter in {checkpoint} was trained on other weights than those of {base} (checksum {expected}, not "
            f"{checksum}); name its base model with --base"
        )


def _load_model(folder: Path, dtype: torch.dtype, auto_class: Any = AutoModelForCausalLM) -> PreTrainedModel:
    model: PreTrainedModel = auto_class.from_pretrained(folder, dtype=dtype)
    return model.eval()


@torch.no_grad()
def _probe(model: torch.nn.Module) -> torch.Tensor:
    """Return the logits of fixed tokens, in float32."""
    n_tokens = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    token_ids = torch.randint(n_tokens, (2, N_PROBED_TOKENS), generator=torch.Generator().manual_seed(0))
    logits: torch.Tensor = model(input_ids=token_ids, use_cache=False).logits.float()
    return logits


def _compare(
    merged: Path, probe_sources: Callable[[torch.dtype], torch.Tensor], auto_class: Any = AutoModelForCausalLM
) -> float:
    """Return the relative difference between the logits of a merged model and those of its sources.

    One model is in memory at a time.

    Raises:
        CheckpointError: it is larger than rounding explains.
    """
    dtype = read_dtype(merged)
    reference = probe_sources(dtype)
    gc.collect()  # a model may be part of a reference cycle
    model = _load_model(merged, dtype, auto_class)
    gap = ((_probe(model) - reference).norm() / reference.norm().clamp(min=1e-6)).item()
    limit = TOLERANCE if dtype == torch.float32 else LOW_PRECISION_TOLERANCE
    if not gap <= limit:
        raise CheckpointError(
            f"the merged model is wrong, and nothing was written: its logits differ from those of its sources by "
            f"{gap:.2g} of their norm, more than {limit:g}; report this with the names of the models"
        )
    return gap
