"""Merge a training checkpoint's model into one folder."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from skyrl_train.checkpoint.manifest import MANIFEST, find_damage
from skyrl_train.checkpoint.merge.adapter import merge_adapter
from skyrl_train.checkpoint.merge.comparison import MergeReport, compare, probe
from skyrl_train.checkpoint.model_folder import (
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
from skyrl_train.checkpoint.store import CheckpointStore
from skyrl_train.distributed import BASE_MODEL
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.models.loading import AUTO_CLASSES, create_empty, model_class
from skyrl_train.models.lora import ADAPTER_FOLDER, merged_buffers
from skyrl_train.types.specs import Role, TensorSpec

logger = logging.getLogger(__name__)

PREFIX = "model.model."
"""Prefix of the weights' names in a checkpoint."""


def merge_checkpoint(
    source: Path,
    target: Path,
    base: str | None = None,
    dtype: DType = "auto",
    role: Role = "policy",
    *,
    allow_unchanged: bool = False,
) -> MergeReport:
    """Write a training checkpoint's model, saved by any number of ranks, into a new folder.

    An adapter is merged into its base and also copied to the subfolder `lora_adapter`.

    Args:
        source: a checkpoint `global_step_N`, the folder of one of its models, or a folder of checkpoints (the latest is
            merged).
        target: the folder to write.
        base: the model that the run started from. Defaults to the one recorded in the checkpoint, if it is on this
            machine. An adapter needs it.
        dtype: dtype of the merged weights. Defaults to the dtype of the run's exports, or of the adapter's base.
        role: the model to merge, if the checkpoint has several.
        allow_unchanged: accept a result that equals the base.

    Raises:
        ConfigError: `target` exists.
        CheckpointError: the checkpoint is incomplete, its weights equal the base, or the result cannot be written or
            has wrong logits.
    """
    folder = _find_model(source, role)
    settings = folder / "huggingface"
    if (folder / ADAPTER_FOLDER).is_dir():
        adapter = str(folder / ADAPTER_FOLDER)
        return merge_adapter(adapter, target, base, dtype, settings, allow_unchanged=allow_unchanged)
    role = next((known for known in AUTO_CLASSES if known == folder.name), role)
    model, specs = create_empty(str(settings), role), _list_tensors(folder)
    buffers = merged_buffers(model)
    names = [*(name for name, _ in model.named_parameters()), *buffers]
    if missing := [name for name in names if name not in specs]:
        raise CheckpointError(f"{folder} has no {missing[0]} of a {type(model).__name__}; it is from another version")
    export_dtype = read_dtype(settings)

    def rename(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return revert_weight_conversion(model, {name: tensor})

    def read() -> NamedTensors:
        for name in names:
            tensor = torch.empty(specs[name].shape, dtype=specs[name].dtype)
            _load_sharded(folder, {PREFIX + name: tensor})
            yield from rename(name, tensor).items()

    def probe_sources(dtype: torch.dtype) -> torch.Tensor:
        with no_init_weights():
            loaded = model_class(role, model.config).from_config(model.config, dtype=dtype).eval()
        _load_sharded(folder, {PREFIX + name: tensor for name, tensor in loaded.state_dict().items()})
        return probe(loaded)

    written = {name: specs[name].dtype if name in buffers else export_dtype for name in names}
    shapes = (rename(name, torch.empty(specs[name].shape, dtype=written[name], device="meta")) for name in names)
    files = [TensorSpec(name, tuple(one.shape), one.dtype) for named in shapes for name, one in named.items()]
    changed: list[str] = []
    base_model = _open_base(folder, base)
    with new_folder(target) as partial:
        copy_settings([settings], partial)
        edit_config(partial, architectures=[type(model).__name__])
        tensors = read() if base_model is None else _compare_with_base(read(), base_model, files, dtype, changed)
        write_model(partial, files, tensors, dtype)
        if base_model is not None and not (changed or allow_unchanged):
            raise CheckpointError(
                f"{folder} has the same weights as {base_model.folder}, the model its run started from. Nothing was "
                "trained, or the changes are too small for the type. Use a later checkpoint, or --dtype=float32, or "
                "--allow-unchanged for a copy."
            )
        gap = compare(partial, probe_sources, role)
    return MergeReport(target, len(files), None if base_model is None else len(changed), gap)


def _list_tensors(folder: Path) -> dict[str, TensorSpec]:
    """Return the names, shapes and dtypes of the weights in a checkpoint."""
    items = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    saved = {key.removeprefix(PREFIX): item for key, item in items if key.startswith(PREFIX)}
    return {
        name: TensorSpec(name, tuple(item.size), item.properties.dtype)
        for name, item in saved.items()
        if isinstance(item, TensorStorageMetadata)
    }


def _open_base(checkpoint: Path, base: str | None) -> OpenModel | None:
    """Open the model that the checkpoint's run started from, or return None if it is unknown or not on this machine."""
    if base is not None:
        return open_model(base)
    if not (checkpoint / BASE_MODEL).is_file():
        return None
    try:
        name = (checkpoint / BASE_MODEL).read_text(encoding="utf-8").strip()
        return open_model(name, local_files_only=True)
    except ConfigError as error:
        logger.warning("Not compared with the model that the run started from: %s", error)
        return None


def _compare_with_base(
    tensors: NamedTensors, base: OpenModel, specs: Sequence[TensorSpec], dtype: DType, changed: list[str]
) -> NamedTensors:
    """Yield the tensors of a trained model, and append to `changed` the names of those that training changed.

    They are compared in the dtype in which they are written. A tensor that the base model lacks is the head of a critic
    or a reward model, which starts at zero.
    """
    names = {spec.name for spec in base.specs}
    for spec, (name, tensor) in zip(specs, tensors, strict=True):
        written = output_dtype(spec, dtype)
        before = base.read(name) if name in names else torch.zeros_like(tensor)
        changed += [] if torch.equal(tensor.to(written), before.to(spec.dtype).to(written)) else [name]
        yield name, tensor


def _find_model(source: Path, role: Role) -> Path:
    """Return the folder of one model in a checkpoint, after checking the checkpoint's checksums."""
    folder = source if (source / ".metadata").is_file() else source / role
    if source.is_dir() and not (folder / ".metadata").is_file() and (latest := CheckpointStore(source).latest()):
        folder = latest / role
    if not (folder / ".metadata").is_file():
        raise CheckpointError(
            f"{source} has no {role} checkpoint, because {folder / '.metadata'} is missing; pass a folder such as "
            "outputs/<project>/<run>/ckpts/global_step_40"
        )
    step_folder = folder.parent
    if (step_folder / MANIFEST).is_file() and (damage := find_damage(step_folder)):
        raise CheckpointError(f"cannot merge {folder}: {', '.join(damage)}; use another checkpoint")
    return folder


def _load_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Load a checkpoint's tensors in place, in this process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
