"""The models of a run with their sizes, and a forecast of its disk space, before anything is loaded."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from skyrl_train.config.policy import LoraConfig, TrainDtype
from skyrl_train.models.weight_files import find_folder, list_weight_files
from skyrl_train.types.specs import Role, lora_spec
from skyrl_train.types.training_memory import TrainingBytes, bytes_per_parameter

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that the run loads."""

    role: Role
    path: str
    dtype: str
    """Dtype of frozen weights and of exports."""
    lora: LoraConfig | None = None
    n_parameters: int | None = None
    """None: unknown before the download."""
    n_trained: int | None = None
    train_dtype: TrainDtype = "float32"
    training: TrainingBytes = field(default_factory=lambda: TrainingBytes(0, 0, 0))
    """Memory of the trained parameters."""
    frozen_bytes: float = 0
    """Size of the weights that are not trained: of the reference, or under an adapter."""
    file_bytes: int = 0
    """Size of the weight files on this machine."""
    n_dequantized: int = 0
    """Parameters of the largest quantized matrix."""

    @property
    def name(self) -> str:
        """Name to display."""
        return {"ref": "reference", "reward": "reward model"}.get(self.role, self.role)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of what is trained in a checkpoint: values and moments."""
        return round(self.training.in_checkpoint)

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in exports and in engines."""
        return (self.n_parameters or 0) * BYTES[self.dtype]

    @property
    def training_bytes(self) -> float:
        """Device memory for weights, gradients and optimizer state."""
        return self.training.on_device + self.frozen_bytes

    @property
    def is_mapped(self) -> bool:
        """Return True if the weights are loaded in the dtype of the files, whose memory they then share."""
        return self.n_parameters is not None and round(self.file_bytes / self.n_parameters) == BYTES[self.dtype]

    @property
    def export_bytes(self) -> int:
        """Size of an export: the weights, or the adapter alone."""
        is_adapter = self.lora is not None and not self.lora.merge_on_export
        return round(self.training.weights) if is_adapter else self.weight_bytes

    def read_config(self) -> PretrainedConfig | None:
        """Read the model's configuration, or return None if it is not on this machine or not one of transformers."""
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.path, local_files_only=True)
        except (OSError, ValueError):
            return None


def plan_model(role: Role, trainer: Any) -> PlannedModel:
    """Look up the size of a role's model. Raise ConfigError if its adapter does not fit."""
    owner = trainer.policy if role == "reward" else getattr(trainer, role)
    section = owner.model
    n_parameters = n_trained = count_parameters(section.path)
    folder = find_folder(section.path)
    file_bytes = sum(file.stat().st_size for file in list_weight_files(folder)) if folder and n_parameters else 0
    if role == "ref":
        dtype = trainer.policy.model.dtype
        n_bytes = (n_parameters or 0) * BYTES[dtype]
        return PlannedModel(role, section.path, dtype, None, n_parameters, frozen_bytes=n_bytes, file_bytes=file_bytes)
    lora = lora_spec(section, f"trainer.{'critic' if role == 'critic' else 'policy'}.model.lora", trainer.seed)
    frozen, n_dequantized = 0.0, 0
    if lora is not None and n_parameters is not None:
        from skyrl_train.models.lora import count_trained
        from skyrl_train.models.quantization import measure_quantized

        n_trained = count_trained(section.path, lora, role)
        frozen = n_parameters * BYTES[section.dtype]
        if lora.config.is_quantized:
            quantized = measure_quantized(section.path, role)
            frozen += quantized.n_bytes - quantized.n_parameters * BYTES[section.dtype]
            n_dequantized = quantized.n_largest
    optimizer = owner.optimizer_config
    train_dtype: TrainDtype = "float32" if lora is not None else section.train_dtype
    per_parameter = bytes_per_parameter(train_dtype, optimizer.name, cpu_offload=optimizer.cpu_offload)
    training = per_parameter.scaled(n_trained or 0)
    adapter = None if lora is None else lora.config
    return PlannedModel(
        *(role, section.path, section.dtype, adapter, n_parameters, n_trained, train_dtype, training, frozen),
        file_bytes=file_bytes,
        n_dequantized=n_dequantized,
    )


@dataclass(frozen=True, slots=True)
class DiskForecast:
    """Disk space for checkpoints and exports of a run."""

    checkpoint_bytes: int
    interval: int
    n_kept: int | None  # maximum; None keeps all
    n_checkpoints: int | None  # in the whole run; None if its number of steps is unknown
    export_bytes: int
    n_exports: int | None

    @property
    def min_bytes(self) -> int:
        """Minimum disk space: two checkpoints (the old one is kept until the new one is complete) and an export."""
        return 2 * self.checkpoint_bytes + (self.export_bytes if self.n_exports != 0 else 0)

    @property
    def total_bytes(self) -> int:
        """Maximum disk space of the run, including a checkpoint in progress.

        If the number of steps is unknown, it counts two checkpoints and no exports.
        """
        n_checkpoints = 1 if self.n_checkpoints is None else self.n_checkpoints
        n_kept = n_checkpoints if self.n_kept is None else min(self.n_kept, n_checkpoints)
        n_on_disk = min(n_kept + 1, max(n_checkpoints, 2)) if self.checkpoint_bytes else 0
        return n_on_disk * self.checkpoint_bytes + (self.n_exports or 0) * self.export_bytes

    def describe(self) -> str:
        """Return the forecast in one line."""
        parts = []
        if self.checkpoint_bytes:
            kept = {None: "all kept", 1: "the last one kept"}.get(self.n_kept, f"the last {self.n_kept} kept")
            every = format_count(self.interval, "step")
            parts.append(f"{format_bytes(self.checkpoint_bytes)} per checkpoint, every {every}, {kept}")
        if self.export_bytes:
            size = format_bytes(self.export_bytes)
            parts.append(f"{size} per export" if self.n_exports is None else f"exports {self.n_exports:,} × {size}")
        if self.n_checkpoints is not None:
            parts.append(f"up to {format_bytes(self.total_bytes)}")
        return " · ".join(parts) or "no checkpoints and no exports"


def free_bytes(folder: str) -> int:
    """Return the free bytes on the disk of a folder that need not exist."""
    existing = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def count_parameters(path: str) -> int | None:
    """Count the parameters of a model in a local folder or the Hub's cache. Return None if it is in neither.

    A folder without weights but with a `config.json` describes a model whose parameters can be counted, too.
    """
    if (folder := find_folder(path)) is None:
        return None
    n_parameters = 0
    if not (files := list_weight_files(folder)) and (folder / "config.json").is_file():
        from skyrl_train.models.loading import create_empty

        return sum(parameter.numel() for parameter in create_empty(str(folder), "policy").parameters())
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118, not a mapping
                    n_parameters += math.prod(tensors.get_slice(name).get_shape())
        except (OSError, SafetensorError):
            return None
    return n_parameters or None


def format_count(n: int, noun: str) -> str:
    plural = noun if n == 1 else f"{noun}es" if noun.endswith("ch") and noun != "epoch" else f"{noun}s"
    return f"{n:,} {plural}"


def format_bytes(n_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"
