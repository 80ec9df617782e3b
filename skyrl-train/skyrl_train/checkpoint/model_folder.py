"""Model folders in Hugging Face format. They are read tensor by tensor, and written completely or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from tqdm import tqdm
from transformers.modeling_utils import str_to_torch_dtype

from skyrl_train.checkpoint.durable import LOCK_FILE, folder_lock, sync, sync_tree
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.models.weight_files import SINGLE_FILE, list_weight_files
from skyrl_train.types.specs import TensorSpec

DType = Literal["auto", "float32", "bfloat16", "float16"]
"""Dtype of the written weights. `auto` keeps the dtype of each tensor."""

NamedTensors = Iterator[tuple[str, torch.Tensor]]

SHARD_BYTES = 5 * 10**9
"""Maximum size of a file, unless one tensor is larger."""
COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".py", ".tiktoken")
"""Suffixes of a model's files other than its weights."""
MORE_TEMPLATES = "additional_chat_templates"
TOKENIZER_FILES = (
    *("tokenizer*", "*.jinja", "*.model", "*.tiktoken"),
    *("special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
)
NOT_COPIED = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "adapter_config.json")


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model's safetensors files. A file is mapped into memory only while one of its tensors is read."""

    folder: Path
    specs: list[TensorSpec]
    read: Callable[[str], torch.Tensor]


def open_model(path: str, *, local_files_only: bool = False) -> OpenModel:
    """Open the weights of a model folder or a Hub model. With `local_files_only`, use the Hub's cache, no download.

    Raises:
        ConfigError: there is no such model, a file is unreadable, or the weights or `config.json` are missing.
    """
    folder = Path(path)
    if not folder.is_dir():
        try:
            patterns = ["*.safetensors", *(f"*{suffix}" for suffix in COPIED_SUFFIXES)]
            folder = Path(snapshot_download(path, allow_patterns=patterns, local_files_only=local_files_only))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"there is no model {path}: {reason}. Use a folder, or a name on the Hub.") from error
    specs: list[TensorSpec] = []
    file_of: dict[str, Path] = {}
    for file in list_weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118, not a mapping
                    entry = tensors.get_slice(name)
                    specs.append(TensorSpec(name, tuple(entry.get_shape()), str_to_torch_dtype[entry.get_dtype()]))
                    file_of[name] = file
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {file}: {error}. Save the model again.") from error
    if not specs or not (folder / "config.json").is_file():
        raise ConfigError(
            f"{path} has no {'config.json' if specs else SINGLE_FILE}; save the model with save_pretrained"
        )

    def read(name: str) -> torch.Tensor:
        with safe_open(file_of[name], framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor

    return OpenModel(folder, specs, read)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder, sync its files at the end, and rename it to `target`. After an error, no files are left.

    Raises:
        ConfigError: `target` exists, or another process is writing it.
        CheckpointError: the write failed.
    """
    partial = target.parent / f".{target.name}.partial"  # `with_name` fails for the folder "."
    with folder_lock(partial, f"wait until it ends, or choose a folder other than {target}"):
        try:
            if target.exists():
                raise ConfigError(f"{target} already exists; choose a new folder")
            for leftover in partial.iterdir():  # files of a killed process
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
                    f"failed to write {target}: {error}. Free disk space, or choose another folder."
                ) from error
            raise


def copy_settings(sources: Sequence[Path], target: Path, tokenizer: Path | None = None) -> None:
    """Copy models' files other than weights. A later source's files replace an earlier one's.

    The tokenizer and its chat templates all come from the same folder: `tokenizer` if it has a tokenizer, else the last
    source that has one.
    """
    folders = [*sources, *([tokenizer] if tokenizer else [])]
    owner = next((folder for folder in reversed(folders) if (folder / "tokenizer_config.json").is_file()), None)
    for source in folders:
        for file in [*source.iterdir(), *(source / MORE_TEMPLATES).glob("*.jinja")]:
            name = file.relative_to(source)
            is_tokenizer = any(name.match(pattern) for pattern in TOKENIZER_FILES)
            is_setting = file.suffix in COPIED_SUFFIXES and name.name not in NOT_COPIED and source in sources
            if file.is_file() and (source == owner if is_tokenizer and owner else is_setting):
                (target / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target / name)


def edit_config(folder: Path, **settings: object) -> None:
    """Change keys of a model's `config.json`."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | settings
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_model(folder: Path, specs: Sequence[TensorSpec], tensors: NamedTensors, dtype: DType) -> None:
    """Write tensors into safetensors files, in the order of their specs. Floating-point tensors become `dtype`."""
    specs = [replace(spec, dtype=output_dtype(spec, dtype)) for spec in specs]
    n_bytes = sum(spec.n_bytes for spec in specs)
    if (free := shutil.disk_usage(folder).free) < n_bytes:
        raise OSError(f"{n_bytes:,} bytes are needed, but only {free:,} are free")
    chunks: list[list[TensorSpec]] = []  # of at most SHARD_BYTES, but a larger tensor gets one to itself
    size = 0
    for spec in specs:
        if not chunks or size + spec.n_bytes > SHARD_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(spec)
        size += spec.n_bytes
    names = ["model.safetensors"]
    if len(chunks) > 1:
        names = [f"model-{i:05}-of-{len(chunks):05}.safetensors" for i in range(1, len(chunks) + 1)]
        index = {spec.name: name for name, chunk in zip(names, chunks, strict=True) for spec in chunk}
        content = {"metadata": {"total_size": n_bytes}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    with tqdm(total=n_bytes, unit="B", unit_scale=True, desc="Merging", disable=None) as progress:
        for name, chunk in zip(names, chunks, strict=True):
            _write_safetensors(folder / name, chunk, tensors, progress)
    largest = max(specs, key=lambda spec: spec.n_bytes)  # a matrix, so its dtype is the model's
    if largest.dtype != read_dtype(folder):
        edit_config(folder, dtype=str(largest.dtype).removeprefix("torch."))


def output_dtype(spec: TensorSpec, dtype: DType) -> torch.dtype:
    """Return the dtype to write a tensor in."""
    return spec.dtype if dtype == "auto" or not spec.dtype.is_floating_point else getattr(torch, dtype)


def read_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of a model's weights according to its `config.json`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")


def _write_safetensors(path: Path, specs: Sequence[TensorSpec], tensors: NamedTensors, progress: tqdm[Any]) -> None:
    """Write one file, tensor by tensor, because the safetensors library would need all of them in memory."""
    type_names = {dtype: name for name, dtype in str_to_torch_dtype.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.n_bytes
        header[spec.name] = {"dtype": type_names[spec.dtype], "shape": spec.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            name, tensor = next(tensors)
            assert name == spec.name
            assert tuple(tensor.shape) == spec.shape
            tensor = tensor.detach().to("cpu", spec.dtype).contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            progress.update(spec.n_bytes)
