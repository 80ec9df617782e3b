"""Merge an adapter into its base."""

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer

from skyrl_train.checkpoint.merge.comparison import MergeReport, compare, load_model, probe
from skyrl_train.checkpoint.model_folder import (
    MORE_TEMPLATES,
    TOKENIZER_FILES,
    DType,
    NamedTensors,
    OpenModel,
    copy_settings,
    edit_config,
    new_folder,
    open_model,
    output_dtype,
    read_dtype,
    write_model,
)
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.models.checksum import tensor_checksum
from skyrl_train.models.generation import add_eos_ids
from skyrl_train.models.loading import create_empty
from skyrl_train.models.lora import (
    ADAPTER_FOLDER,
    BASE_CHECKSUM,
    Changes,
    TrainedHead,
    adapter_role,
    read_changes,
    read_config,
)
from skyrl_train.types.specs import Role, TensorSpec


def merge_adapter(
    adapter: str,
    target: Path,
    base: str | None = None,
    dtype: DType = "auto",
    settings: Path | None = None,
    *,
    allow_unchanged: bool = False,
) -> MergeReport:
    """Write the base model with an adapter merged into it, W + (alpha / rank) · B·A, into a new folder.

    Args:
        adapter: folder or Hub name of an adapter in peft's format.
        target: the folder to write.
        base: folder or Hub name of the base model. Defaults to the base in the adapter's settings.
        dtype: dtype of the merged weights. Defaults to the base's.
        settings: the folder with a checkpoint's configuration and tokenizer, if the adapter is from a checkpoint.
        allow_unchanged: accept a result that equals the base.

    Raises:
        ConfigError: `target` exists, or the adapter does not fit the base.
        CheckpointError: the adapter has no effect or another base, or the result cannot be written or has wrong logits.
    """
    config = read_config(adapter, f"the adapter {adapter}")
    base = base or config.base_model_name_or_path
    if not base:
        raise ConfigError(f"the adapter {adapter} does not say which base model it belongs to; pass it with --base")
    role = adapter_role(config)
    source = open_model(base)
    changes, frozen, buffers = read_changes(adapter, str(source.folder))
    files = {name for names in frozen.values() for name in names} | set(buffers)
    specs = _merged_specs(source.specs, changes, files)
    needed = changes.keys() if role == "policy" else changes.keys() | files
    if missing := sorted(needed - {spec.name for spec in specs}):
        raise ConfigError(f"{base} lacks {missing[0]}, which the adapter {adapter} needs; pass its base model")
    tally = _Tally() if settings is None else _Tally(read_dtype(settings), frozen)
    with new_folder(target) as partial:
        sources = [source.folder, *([settings] if settings else [])]
        copy_settings(sources, partial, tokenizer=_find_folder(adapter) if settings is None else None)
        if role != "policy":
            _describe_scores(partial, role, adapter, is_complete=settings is not None)
        elif (partial / "tokenizer_config.json").is_file():
            add_eos_ids(partial, [AutoTokenizer.from_pretrained(partial).eos_token_id])
        write_model(partial, specs, _apply_changes(source, specs, changes, dtype, tally), dtype)
        if settings is not None:
            if not frozen.keys() <= {spec.name for spec in source.specs}:  # transformers joins experts to one tensor
                parameters = load_model(source.folder, read_dtype(settings), role).named_parameters()
                tally.checksum = sum(tensor_checksum(name, tensor) for name, tensor in parameters if name in frozen)
            _check_base(settings.parent, base, tally.checksum % 2**64)
            shutil.copytree(adapter, partial / ADAPTER_FOLDER)
        if not (tally.n_changed or allow_unchanged):
            reason = "B·A is 0, or too small for the type" if config.lora_alpha else "its alpha is 0"
            raise CheckpointError(
                f"merging the adapter {adapter} would change none of the {len(specs)} tensors of {base}: "
                f"{reason}; use an adapter that was trained, or --dtype=float32"
            )

        def probe_sources(dtype: torch.dtype) -> torch.Tensor:
            loaded = load_model(source.folder, dtype, role, AutoConfig.from_pretrained(partial))
            model: Any = peft.PeftModel.from_pretrained(loaded, adapter)
            return probe(model.eval())

        gap = compare(partial, probe_sources, role)
    return MergeReport(target, len(specs), tally.n_changed, gap)


def _merged_specs(base: Sequence[TensorSpec], changes: Changes, frozen: Collection[str]) -> list[TensorSpec]:
    """Return the tensors of a merged model. If the adapter has a trained head, it replaces the language-model head."""
    heads = {
        name: TensorSpec(name, tuple(change.values.shape), change.values.dtype)
        for name, change in changes.items()
        if isinstance(change, TrainedHead)
    }
    kept = [spec for spec in base if spec.name not in heads and (not heads or spec.name in frozen)]
    return [*kept, *heads.values()]


def _find_folder(adapter: str) -> Path:
    """Return an adapter's folder, and download its tokenizer files if it is on the Hub."""
    if Path(adapter).is_dir():
        return Path(adapter)
    return Path(snapshot_download(adapter, allow_patterns=[*TOKENIZER_FILES, f"{MORE_TEMPLATES}/*"]))


def _describe_scores(folder: Path, role: Role, adapter: str, *, is_complete: bool) -> None:
    """Turn a base's configuration into a critic's or reward model's. A complete one lacks only the architecture."""
    if not is_complete:
        edit_config(folder, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
        if role == "reward":  # its head reads the last non-pad token
            if not (folder / "tokenizer_config.json").is_file():
                raise ConfigError(
                    f"neither the adapter {adapter} nor its base has a tokenizer, but a reward model needs its pad "
                    "token; copy the run's tokenizer into the adapter's folder"
                )
            tokenizer = AutoTokenizer.from_pretrained(folder)
            has_pad = tokenizer.pad_token_id is not None
            edit_config(folder, pad_token_id=tokenizer.pad_token_id if has_pad else tokenizer.eos_token_id)
    edit_config(folder, architectures=[type(create_empty(str(folder), role)).__name__])


@dataclass(slots=True)
class _Tally:
    """Running checksum of the base and number of changed tensors."""

    trained_dtype: torch.dtype | None = None
    """Dtype the run loaded the base in, for the checksum. None skips the checksum."""
    frozen: Collection[str] = ()
    """Names of the tensors in the checksum."""
    checksum: int = 0
    n_changed: int = 0


def _apply_changes(
    source: OpenModel, specs: Sequence[TensorSpec], changes: Changes, dtype: DType, tally: _Tally
) -> NamedTensors:
    """Yield the tensors of a base with the changes of an adapter applied."""
    names = {spec.name for spec in source.specs}
    for spec in specs:
        tensor = source.read(spec.name) if spec.name in names else torch.zeros(spec.shape, dtype=spec.dtype)
        if tally.trained_dtype is not None and spec.name in tally.frozen:
            tally.checksum += tensor_checksum(spec.name, tensor.to(tally.trained_dtype))
        if spec.name in changes:
            before = tensor.to(output_dtype(spec, dtype))
            tensor = changes[spec.name].apply(tensor.float()).to(before.dtype)
            tally.n_changed += not torch.equal(tensor, before)
        yield spec.name, tensor


def _check_base(checkpoint: Path, base: str, checksum: int) -> None:
    """Raise CheckpointError if the adapter in a checkpoint was trained on different weights."""
    expected = (checkpoint / BASE_CHECKSUM).read_text(encoding="utf-8").split()[0]
    if expected != str(checksum):
        raise CheckpointError(
            f"the adapter in {checkpoint} was trained on weights that differ from {base} (checksum {expected}, not "
            f"{checksum}); pass its base model with --base"
        )
