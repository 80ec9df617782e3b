"""The models of a run with their sizes, and forecasts of its memory and disk space, before anything is loaded."""

import math
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from skyrl_train.config.policy import LoraConfig, TrainDtype
from skyrl_train.models.weight_files import list_weight_files
from skyrl_train.types.specs import Role, lora_spec
from skyrl_train.types.training_memory import TrainingBytes, bytes_per_parameter

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that the run loads."""

    role: Role
    path: str
    dtype: str
    lora: LoraConfig | None = None
    n_parameters: int | None = None
    """None: unknown before the download."""
    n_trained: int | None = None
    train_dtype: TrainDtype = "float32"
    training: TrainingBytes = field(default_factory=lambda: bytes_per_parameter("float32", "adamw"))
    """Bytes per trained parameter."""

    @property
    def name(self) -> str:
        """Name to display."""
        return {"ref": "reference", "reward": "reward model"}.get(self.role, self.role)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of what is trained in a checkpoint: values and moments."""
        return round((self.n_trained or 0) * self.training.in_checkpoint)

    @property
    def weight_bytes(self) -> int:
        """Size of the weights."""
        return (self.n_parameters or 0) * BYTES[self.dtype]

    @property
    def training_bytes(self) -> int:
        """Memory of a device for weights, gradients and optimizer state."""
        return self.loaded_bytes + round((self.n_trained or 0) * (self.training.gradients + self.training.moments))

    @property
    def loaded_bytes(self) -> int:
        """Memory of a device for the weights alone."""
        frozen = self.weight_bytes if self.lora or self.role == "ref" else 0
        return round((self.n_trained or 0) * self.training.weights) + frozen

    @property
    def idle_bytes(self) -> int:
        """Memory for weights and optimizer state. Gradients exist only during updates."""
        return self.training_bytes - round((self.n_trained or 0) * self.training.gradients)

    @property
    def export_bytes(self) -> int:
        """Size of an export: the weights, or the adapter alone."""
        is_adapter = self.lora is not None and not self.lora.merge_on_export
        return (self.n_trained or 0) * BYTES["float32"] if is_adapter else self.weight_bytes


def plan_model(role: Role, trainer: Any) -> PlannedModel:
    """Look up the size of a role's model. Raise ConfigError if its adapter does not fit."""
    section = trainer.policy.model if role == "reward" else getattr(trainer, role).model
    n_parameters = n_trained = count_parameters(section.path)
    if role == "ref":
        return PlannedModel(role, section.path, trainer.policy.model.dtype, None, n_parameters)
    lora = lora_spec(section, f"trainer.{'critic' if role == 'critic' else 'policy'}.model.lora", trainer.seed)
    if lora is not None and n_parameters is not None:
        from skyrl_train.models.lora import count_trained

        n_trained = count_trained(section.path, lora, role)
    adapter = None if lora is None else lora.config
    optimizer = (trainer.critic if role == "critic" else trainer.policy).optimizer_config
    training = bytes_per_parameter(section.train_dtype, optimizer.name, cpu_offload=optimizer.cpu_offload)
    return PlannedModel(
        role, section.path, section.dtype, adapter, n_parameters, n_trained, section.train_dtype, training
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


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Memory needed for weights, gradients and optimizer state, and memory free on the device."""

    device: str
    needed_bytes: float
    free_bytes: float
    uses_lora: bool
    is_certain: bool
    """False if a cluster may have more memory than this machine, or if ranks may divide the models."""

    @property
    def shortage(self) -> str | None:
        """Why the memory is too small, or None. Activations and an engine need more than is counted here."""
        if self.needed_bytes <= self.free_bytes:
            return None
        lora = "" if self.uses_lora else " LoRA (trainer.policy.model.lora.rank=32),"
        return (
            f"training takes {format_bytes(self.needed_bytes)} on {self.device}, without activations, and "
            f"{format_bytes(self.free_bytes)} are free: use more GPUs (trainer.placement),{lora} or a smaller model"
        )


def free_bytes_of_gpus(n_gpus: int) -> int:
    """Return the free memory of the fullest of the first `n_gpus` visible GPUs, on which ranks will start.

    `torch.cuda.mem_get_info` would create a CUDA context that takes hundreds of MB until the process ends, on a GPU
    that this process may not use. Raise RuntimeError if nvidia-ml-py is not installed, or the driver does not answer.
    """
    try:
        import pynvml
    except ImportError as error:
        raise RuntimeError("nvidia-ml-py is not installed") from error

    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(i) for i in range(pynvml.nvmlDeviceGetCount())] if visible is None else visible.split(",")
        gpus = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in map(str.strip, names[:n_gpus])
        ]
        return min(int(pynvml.nvmlDeviceGetMemoryInfo(gpu).free) for gpu in gpus)
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML reports: {error}") from error


def free_bytes(folder: str) -> int:
    """Return the free bytes on the disk of a folder that need not exist."""
    existing = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def count_parameters(path: str) -> int | None:
    """Count the parameters of a model in a local folder or the Hub's cache. Return None if it is in neither."""
    folder = Path(path)
    if not folder.is_dir():
        cached = try_to_load_from_cache(path, "config.json") if path.count("/") <= 1 else None
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    n_parameters = 0
    for file in list_weight_files(folder):
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
