"""Merge models into one Hugging Face folder: an adapter into its base, a checkpoint of a run, an average of models.

Tensors are read, changed and written one at a time. Before the folder gets its name, the merged model is loaded and its
logits are compared with those of its sources. After an error, nothing is left.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import peft
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from skyrl_train.checkpoint.durable import sync, sync_tree
from skyrl_train.checkpoint.lock import LOCK_FILE, folder_lock
from skyrl_train.checkpoint.manifest import MANIFEST, find_damage
from skyrl_train.checkpoint.store import CheckpointStore
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.models.lora import ADAPTER_FOLDER, BASE_CHECKSUM, MatrixChange, read_changes, read_config
from skyrl_train.types.specs import TensorSpec
from skyrl_train.weight_sync.base import chunked
from skyrl_train.weight_sync.checksum import tensor_checksum

logger = logging.getLogger(__name__)

DType = Literal["auto", "float32", "bfloat16", "float16"]
Role = Literal["policy", "critic", "reward"]

AUTO_CLASSES: Mapping[str, Any] = {
    "policy": AutoModelForCausalLM,
    "critic": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}

SHARD_BYTES = 5 * 10**9
"""Maximum size of a file, unless one tensor is larger."""
N_PROBED_TOKENS = 32
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-4, 1e-1  # relative to the norm of the logits, in float32 and in shorter types
COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".py", ".tiktoken")
"""Files of a model beside its weights."""
NOT_COPIED = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "adapter_config.json")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Types by their names in safetensors files."""


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

    def expected(dtype: torch.dtype) -> torch.Tensor:
        with no_init_weights():
            loaded = auto_class.from_config(model.config, dtype=specs[0].dtype).eval()
        tensors = {f"model.model.{name}": parameter.data for name, parameter in loaded.named_parameters()}
        _load_sharded(folder, tensors)
        return _probe(loaded.to(dtype))

    def rename(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return revert_weight_conversion(model, {name: tensor})

    shapes = (rename(spec.name, torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for spec in specs)
    files = [TensorSpec(name, tuple(one.shape), one.dtype) for named in shapes for name, one in named.items()]
    with _new_folder(target) as partial:
        _copy_settings([settings], partial)
        if auto_class is not AutoModelForCausalLM:
            _edit_config(partial, architectures=[type(model).__name__])
        tensors = (item for spec in specs for item in rename(spec.name, read(spec)).items())
        _write_model(partial, files, tensors, dtype)
        gap = _compare(partial, expected, auto_class)
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
        models = [files.enter_context(_open_model(source)) for source in sources]
        first = models[0]
        _check_same_tensors(sources, models)
        tally = _Tally()

        @torch.no_grad()
        def expected(dtype: torch.dtype) -> torch.Tensor:
            loaded = _load_model(first.folder, dtype)
            for name, parameter in loaded.named_parameters():
                parameter.mul_(shares[0])
                for share, model in zip(shares[1:], models[1:], strict=True):
                    parameter.add_(model.read(name).to(dtype), alpha=share)
            return _probe(loaded)

        with _new_folder(target) as partial:
            _copy_settings([first.folder], partial)
            _write_model(partial, first.specs, _mean(models, shares, dtype, tally), dtype)
            if not tally.n_changed:
                raise CheckpointError(
                    f"the average of {', '.join(sources)} has the weights of {sources[0]}; use models that differ"
                )
            gap = _compare(partial, expected)
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
    with _open_model(base) as source:
        changes = read_changes(adapter, str(source.folder))
        if missing := sorted(changes.keys() - {spec.name for spec in source.specs}):
            raise ConfigError(f"{base} has no {missing[0]}, which the adapter {adapter} changes; name its base model")
        tally = _Tally(trained_dtype=None if settings is None else _read_dtype(settings))

        def expected(dtype: torch.dtype) -> torch.Tensor:
            model: Any = peft.PeftModel.from_pretrained(_load_model(source.folder, dtype), adapter)
            return _probe(model.eval())

        with _new_folder(target) as partial:
            _copy_settings([source.folder, *([settings] if settings else [])], partial)
            _write_model(partial, source.specs, _changed(source, changes, dtype, tally), dtype)
            if settings is not None:
                _check_base(settings.parent, base, tally.checksum % 2**64)
                shutil.copytree(adapter, partial / ADAPTER_FOLDER)
            if not tally.n_changed:
                reason = "B·A is 0, or too small for the type" if config.lora_alpha else "its alpha is 0"
                raise CheckpointError(
                    f"merging the adapter {adapter} would change none of the {len(source.specs)} tensors of {base}: "
                    f"{reason}; use an adapter that was trained, or --dtype=float32"
                )
            gap = _compare(partial, expected)
    return MergeReport(target, len(source.specs), tally.n_changed, gap)


@dataclass(slots=True)
class _Tally:
    """Facts about the tensors that were read and written."""

    n_changed: int = 0
    checksum: int = 0
    trained_dtype: torch.dtype | None = None
    """Type in which the checksum is computed; None for no checksum."""


def _changed(
    source: _OpenModel, changes: Mapping[str, MatrixChange], dtype: DType, tally: _Tally
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model, with the changes of an adapter."""
    for spec in source.specs:
        tensor = source.read(spec.name)
        if tally.trained_dtype is not None:
            tally.checksum += tensor_checksum(spec.name, tensor.to(tally.trained_dtype))
        if spec.name in changes:
            before = tensor.to(_output_dtype(spec, dtype))
            tensor = changes[spec.name].apply(tensor.float()).to(before.dtype)
            tally.n_changed += not torch.equal(tensor, before)
        yield spec.name, tensor


def _mean(
    models: Sequence[_OpenModel], shares: Sequence[float], dtype: DType, tally: _Tally
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weighted means of the tensors of several models."""
    for spec in models[0].specs:
        mean = models[0].read(spec.name)
        if spec.dtype.is_floating_point:
            before = mean.to(_output_dtype(spec, dtype))
            total = torch.zeros(spec.shape)
            for share, model in zip(shares, models, strict=True):
                total += share * model.read(spec.name).float()
            mean = total.to(before.dtype)
            tally.n_changed += not torch.equal(mean, before)
        yield spec.name, mean


def _check_same_tensors(sources: Sequence[str], models: Sequence[_OpenModel]) -> None:
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


@dataclass(frozen=True, slots=True)
class _OpenModel:
    """The safetensors files of a model, open for reading."""

    folder: Path
    specs: list[TensorSpec]
    read: Callable[[str], torch.Tensor]


@contextmanager
def _open_model(path: str) -> Iterator[_OpenModel]:
    """Open the weights of a model in a folder or on the Hub.

    Raises:
        ConfigError: there is no such model, or it has no safetensors files.
    """
    folder = Path(path)
    if not folder.is_dir():
        try:
            folder = Path(
                snapshot_download(path, allow_patterns=["*.safetensors", *(f"*{s}" for s in COPIED_SUFFIXES)])
            )
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"there is no model {path}: {reason}; use a folder, or a name on the Hub") from error
    with ExitStack() as files:
        specs, file_of = [], {}
        for file in sorted(folder.glob("*.safetensors")):
            if file.name == "adapter_model.safetensors":
                continue
            try:
                opened: Any = files.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{file} cannot be read: {error}; save the model again") from error
            for name in opened.keys():  # noqa: SIM118, not a mapping
                entry = opened.get_slice(name)
                specs.append(TensorSpec(name, tuple(entry.get_shape()), DTYPES[entry.get_dtype()]))
                file_of[name] = opened
        if not specs or not (folder / "config.json").is_file():
            raise ConfigError(
                f"{path} has no {'config.json' if specs else '*.safetensors'}; save the model with save_pretrained"
            )
        yield _OpenModel(folder, specs, lambda name: file_of[name].get_tensor(name))


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `target` at the end, once all its files are on disk: complete or absent.

    Raises:
        ConfigError: `target` exists, or another process writes it.
        CheckpointError: the file system refuses.
    """
    partial = target.with_name(f".{target.name}.partial")
    if target.exists():
        raise ConfigError(f"{target} already exists; choose a new folder")
    with folder_lock(partial, f"wait until it ends, or choose another folder than {target}"):
        try:
            for leftover in partial.iterdir():  # of a process that was killed
                if leftover.name != LOCK_FILE:
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield partial
            sync_tree(partial)
            partial.rename(target)
            (target / LOCK_FILE).unlink()
            sync(target.parent)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"{target} could not be written: {error}; free disk space, or choose another folder"
                ) from error
            raise


def _copy_settings(sources: Sequence[Path], target: Path) -> None:
    """Copy the files of models beside their weights; a later source replaces files of an earlier one."""
    for source in sources:
        for file in source.iterdir():
            if file.is_file() and file.suffix in COPIED_SUFFIXES and file.name not in NOT_COPIED:
                shutil.copyfile(file, target / file.name)


def _edit_config(folder: Path, **settings: object) -> None:
    """Change keys of a model's `config.json`."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | settings
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_model(
    folder: Path, specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, torch.Tensor]], dtype: DType
) -> None:
    """Write tensors, in the order of their specs, into safetensors files; floating-point ones as `dtype`."""
    specs = [replace(spec, dtype=_output_dtype(spec, dtype)) for spec in specs]
    n_bytes = sum(spec.n_bytes for spec in specs)
    if (free := shutil.disk_usage(folder).free) < n_bytes:
        raise OSError(f"{n_bytes:,} bytes are needed and {free:,} are free")
    chunks = chunked(specs, SHARD_BYTES)
    names = ["model.safetensors"]
    if len(chunks) > 1:
        names = [f"model-{i:05}-of-{len(chunks):05}.safetensors" for i in range(1, len(chunks) + 1)]
        index = {spec.name: name for name, chunk in zip(names, chunks, strict=True) for spec in chunk}
        content = {"metadata": {"total_size": n_bytes}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    with tqdm(total=n_bytes, unit="B", unit_scale=True, desc="Merging", disable=None) as progress:
        for name, chunk in zip(names, chunks, strict=True):
            _write_safetensors(folder / name, chunk, tensors, progress)
    largest = max(specs, key=lambda spec: spec.n_bytes)  # a matrix
    if largest.dtype != _read_dtype(folder):
        _edit_config(folder, dtype=str(largest.dtype).removeprefix("torch."))


def _output_dtype(spec: TensorSpec, dtype: DType) -> torch.dtype:
    chosen: torch.dtype = spec.dtype if dtype == "auto" or not spec.dtype.is_floating_point else getattr(torch, dtype)
    return chosen


def _read_dtype(folder: Path) -> torch.dtype:
    """Return the type of a model's weights according to its `config.json`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype: torch.dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    return dtype


def _check_base(checkpoint: Path, base: str, checksum: int) -> None:
    """Raise CheckpointError if the adapter in a checkpoint was trained on other weights."""
    expected = (checkpoint / BASE_CHECKSUM).read_text(encoding="utf-8").strip()
    if expected != str(checksum):
        raise CheckpointError(
            f"the adapter in {checkpoint} was trained on other weights than those of {base} (checksum {expected}, not "
            f"{checksum}); name its base model with --base"
        )


def _write_safetensors(
    path: Path, specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, torch.Tensor]], progress: tqdm[Any]
) -> None:
    """Write one file; safetensors' own writer would need all of its tensors in memory."""
    type_names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.n_bytes
        header[spec.name] = {"dtype": type_names[spec.dtype], "shape": spec.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            name, tensor = next(tensors)
            assert name == spec.name
            assert tuple(tensor.shape) == spec.shape
            tensor = tensor.detach().to("cpu", spec.dtype).contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            progress.update(spec.n_bytes)


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
    merged: Path, expected: Callable[[torch.dtype], torch.Tensor], auto_class: Any = AutoModelForCausalLM
) -> float:
    """Return the relative difference between the logits of a merged model and those of its sources.

    One model is in memory at a time.

    Raises:
        CheckpointError: it is larger than rounding explains.
    """
    dtype = _read_dtype(merged)
    reference = expected(dtype)
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
