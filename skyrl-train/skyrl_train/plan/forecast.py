"""Forecast the memory and the disk space of a run, before anything is loaded."""

import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from skyrl_train.algorithms.rules import loads_reference
from skyrl_train.config import SkyRLConfig, TrainerConfig
from skyrl_train.config.policy import CriticModelConfig, FSDPConfig, LoraConfig, MegatronConfig, PolicyModelConfig
from skyrl_train.config.preferences import DPOTrainerConfig, RewardConfig
from skyrl_train.config.run import RunConfig, RunPlacementConfig
from skyrl_train.config.sft import SFTTrainerConfig, SupervisedConfig
from skyrl_train.dataset.files import count_rows
from skyrl_train.models.weight_files import list_weight_files
from skyrl_train.types.specs import Role, lora_spec

logger = logging.getLogger(__name__)

ModelName = Literal["policy", "critic", "reference", "reward model"]
ROLES: Mapping[ModelName, Role] = {"policy": "policy", "critic": "critic", "reference": "ref", "reward model": "reward"}

Ranks = Mapping[ModelName, tuple[int, int]]
"""Nodes, and ranks per node, of each model."""

BYTES = {"float32": 4, "bfloat16": 2}
BYTES_WHEN_TRAINED = 4 * BYTES["float32"]  # weights, gradients and the two moments of AdamW
COPIES_IN_CHECKPOINT = 3  # weights and moments


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that the run loads."""

    role: ModelName
    path: str
    dtype: str
    lora: LoraConfig | None = None
    n_parameters: int | None = None
    """None: unknown before the download."""
    n_trained: int | None = None

    @property
    def checkpoint_bytes(self) -> int:
        """Size of what is trained in a checkpoint: values and moments."""
        return (self.n_trained or 0) * BYTES["float32"] * COPIES_IN_CHECKPOINT

    @property
    def weight_bytes(self) -> int:
        """Size of the weights."""
        return (self.n_parameters or 0) * BYTES[self.dtype]

    @property
    def training_bytes(self) -> int:
        """Memory for weights, gradients and optimizer state."""
        frozen = self.weight_bytes if self.lora or self.role == "reference" else 0
        return (self.n_trained or 0) * BYTES_WHEN_TRAINED + frozen

    @property
    def loaded_bytes(self) -> int:
        """Memory for the weights alone. Trained weights are float32."""
        return self.training_bytes - self.checkpoint_bytes

    @property
    def idle_bytes(self) -> int:
        """Memory for weights and optimizer state. Gradients exist only during updates."""
        return self.training_bytes - self.checkpoint_bytes // COPIES_IN_CHECKPOINT

    @property
    def export_bytes(self) -> int:
        """Size of an export: the weights, or the adapter alone."""
        is_adapter = self.lora is not None and not self.lora.merge_on_export
        return self.checkpoint_bytes // COPIES_IN_CHECKPOINT if is_adapter else self.weight_bytes


def forecast_offloaded_bytes(shares: Mapping[PlannedModel, float], engine_bytes: float) -> float:
    """Return the host memory that idle models and a sleeping engine need for a device. Their processes keep it.

    Args:
        shares: the part of each model that is on the device. The weights of the policy only leave it for other models.
        engine_bytes: weights of the engine on the device.
    """
    staying = sum(share * model.loaded_bytes for model, share in shares.items() if len(shares) == 1)
    return sum(share * model.idle_bytes for model, share in shares.items()) - staying + engine_bytes


def plan_models(cfg: SkyRLConfig | SupervisedConfig) -> list[PlannedModel]:
    """Return each model that the run loads. Raise ConfigError if an adapter does not fit."""
    policy, ref = cfg.trainer.policy.model, None
    models = [_plan_trained_model("reward" if isinstance(cfg, RewardConfig) else "policy", policy, cfg.trainer.seed)]
    if isinstance(cfg, SkyRLConfig):
        if cfg.trainer.critic.model.path is not None:
            models.append(_plan_trained_model("critic", cfg.trainer.critic.model, cfg.trainer.seed))
        ref = cfg.trainer.ref if loads_reference(cfg) else None
    elif isinstance(cfg.trainer, DPOTrainerConfig):
        ref = None if cfg.trainer.policy_is_reference else cfg.trainer.ref
    if ref is not None:
        n_parameters = count_parameters(ref.model.path)
        models.append(PlannedModel("reference", ref.model.path, policy.dtype, n_parameters=n_parameters))
    return models


def _plan_trained_model(
    role: Literal["policy", "critic", "reward"], section: PolicyModelConfig | CriticModelConfig, seed: int
) -> PlannedModel:
    path = str(section.path)
    n_parameters = n_trained = count_parameters(path)
    lora = lora_spec(section, f"trainer.{'critic' if role == 'critic' else 'policy'}.model.lora", seed)
    if lora is not None and n_parameters is not None:
        from skyrl_train.models.lora import count_trained

        n_trained = count_trained(path, lora, role)
    name: ModelName = "reward model" if role == "reward" else role
    return PlannedModel(name, path, section.dtype, None if lora is None else lora.config, n_parameters, n_trained)


def count_batches(trainer: TrainerConfig | SFTTrainerConfig, sources: Sequence[str]) -> int | None:
    """Return the batches per epoch, or None before the data is downloaded."""
    counts = [count_rows(source) for source in sources]
    if None in counts or not counts:
        return None
    return sum(filter(None, counts)) // trainer.train_batch_size


def limit_steps(trainer: RunConfig, n_batches: int) -> int:
    """Return the steps of a run with `n_batches` per epoch."""
    n_steps = trainer.epochs * n_batches
    return min(n_steps, trainer.max_training_steps or n_steps)


def count_steps(trainer: RunConfig, n_batches: int | None) -> int | None:
    """Return the steps of a run with `n_batches` per epoch, or None if neither they nor the maximum are known."""
    return trainer.max_training_steps if n_batches is None else limit_steps(trainer, n_batches)


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
            kept = (
                "all kept"
                if self.n_kept is None
                else "the last one kept"
                if self.n_kept == 1
                else f"the last {self.n_kept} kept"
            )
            every = format_count(self.interval, "step")
            parts.append(f"{format_bytes(self.checkpoint_bytes)} per checkpoint, every {every}, {kept}")
        if self.export_bytes:
            size = format_bytes(self.export_bytes)
            parts.append(f"{size} per export" if self.n_exports is None else f"exports {self.n_exports:,} × {size}")
        if self.n_checkpoints is not None:
            parts.append(f"up to {format_bytes(self.total_bytes)}")
        return " · ".join(parts) or "no checkpoints and no exports"


def forecast_disk(
    trainer: TrainerConfig | SFTTrainerConfig, models: Sequence[PlannedModel], n_steps: int | None
) -> DiskForecast | None:
    """Forecast the disk space of a run. Return None if the size of a model is unknown. `n_steps` is None if unknown."""
    if any(model.n_parameters is None for model in models):
        return None

    def times(interval: int) -> int | None:
        return 0 if interval < 0 else None if n_steps is None else math.ceil(n_steps / interval)

    is_saved = trainer.ckpt_interval > 0
    n_kept = 1 if trainer.remote_ckpt_url is not None and trainer.max_ckpts_to_keep < 0 else trainer.max_ckpts_to_keep
    trained = [model for model in models if model.role != "reference"]
    checkpoint_bytes = sum(model.checkpoint_bytes for model in trained)
    if isinstance(trainer, TrainerConfig) and trainer.update_ref_every_epoch:  # the reference also changes
        checkpoint_bytes += sum(model.weight_bytes for model in models if model.role == "reference")
    return DiskForecast(
        checkpoint_bytes=checkpoint_bytes if is_saved else 0,
        interval=trainer.ckpt_interval,
        n_kept=None if n_kept < 0 else n_kept,
        n_checkpoints=times(trainer.ckpt_interval),
        export_bytes=sum(model.export_bytes for model in trained) if trainer.hf_save_interval > 0 else 0,
        n_exports=times(trainer.hf_save_interval),
    )


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


def forecast_memory(
    trainer: TrainerConfig | SFTTrainerConfig, models: Sequence[PlannedModel], *, offloads_idle: bool = False
) -> MemoryForecast | None:
    """Forecast the memory of a run.

    Return None if the model is not downloaded yet, if Ray may use other machines, or if the free memory of the GPUs is
    unknown. Count only the largest model if models have separate devices or are offloaded while idle.
    """
    import torch  # takes a second, which a mistake in the configuration should not cost

    ranks = plan_ranks(trainer.placement, models)
    is_elsewhere = bool(ranks) and os.environ.get("RAY_ADDRESS", "local") != "local"
    if is_elsewhere or any(model.n_parameters is None for model in models):
        return None
    sizes = [model.training_bytes / (count_shards(trainer, model, ranks) if ranks else 1) for model in models]
    needed = max(sizes) if ranks or offloads_idle else sum(sizes)
    is_on_host = (
        bool(ranks) and not trainer.strategy_traits.is_model_parallel and trainer.policy.fsdp_config.cpu_offload
    )
    uses_lora = models[0].lora is not None
    n_processes = max((n_per_node for _, n_per_node in ranks.values()), default=1)
    is_certain = not ranks and os.environ.get("WORLD_SIZE", "1") == "1"  # torchrun may have started several processes
    if torch.cuda.is_available() and not is_on_host:
        try:
            free = _free_bytes_of_other_processes(n_processes) if ranks else torch.cuda.mem_get_info()[0]
        except RuntimeError as error:
            logger.info("The free memory of the GPUs is unknown, so the forecast is left out: %s", error)
            return None
        return MemoryForecast("each GPU" if ranks else "the GPU", needed, free, uses_lora, is_certain)
    available = psutil.virtual_memory().available
    return MemoryForecast("this machine", needed * n_processes, available, uses_lora, is_certain)


def _free_bytes_of_other_processes(n_gpus: int) -> int:
    """Return the free memory of the fullest of the first `n_gpus` visible GPUs, on which ranks will start.

    `torch.cuda.mem_get_info` would create a CUDA context that takes hundreds of MB until the process ends, on a GPU
    that this process may not use.

    Raises:
        RuntimeError: nvidia-ml-py is not installed, or the driver does not report the memory.
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


def plan_ranks(placement: RunPlacementConfig, models: Sequence[PlannedModel]) -> Ranks:
    """Return the ranks of each model, or {} for a run in one process."""
    if not (placement.uses_ray or placement.uses_torchrun):
        return {}
    return {model.role: placement.size(ROLES[model.role]) for model in models}


def count_shards(trainer: TrainerConfig | SFTTrainerConfig, model: PlannedModel, ranks: Ranks) -> int:
    """Return the number of ranks that one copy of a model is split over."""
    section = getattr(trainer, ROLES[model.role], trainer.policy)  # `skyrl reward` trains trainer.policy
    if trainer.strategy_traits.is_model_parallel:
        megatron: MegatronConfig = section.megatron_config
        return megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    fsdp: FSDPConfig = section.fsdp_config
    return fsdp.fsdp_size if fsdp.fsdp_size > 0 else math.prod(ranks[model.role])


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
