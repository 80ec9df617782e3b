"""The plan of a run before anything is loaded: model, data, steps, devices, memory and disk."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from skyrl_train.algorithms.rules import reads_reference
from skyrl_train.config import SkyRLConfig, TrainerConfig
from skyrl_train.config.policy import CriticModelConfig, LoraConfig, PolicyModelConfig
from skyrl_train.config.preferences import DPOTrainerConfig, PreferenceDataConfig, RewardConfig
from skyrl_train.config.run import RunPlacementConfig
from skyrl_train.config.sft import SFTTrainerConfig, SupervisedConfig
from skyrl_train.dataset.files import count_rows
from skyrl_train.entrypoints.preflight import read_context_length
from skyrl_train.types.specs import Role, lora_spec

ModelName = Literal["policy", "critic", "reference", "reward model"]
ROLES: Mapping[ModelName, Role] = {
    "policy": "policy",
    "critic": "critic",
    "reference": "ref",
    "reward model": "reward",
}
Ranks = Mapping[ModelName, tuple[int, int]]

BYTES = {"float32": 4, "bfloat16": 2}
COPIES_WHEN_TRAINED = 4  # weights, gradients and the two moments of AdamW
COPIES_IN_CHECKPOINT = 3  # weights and moments


def describe_plan(cfg: SkyRLConfig) -> str:
    """Return the plan of a training run, one `name  value` line per fact.

    Reads local files and the Hub's cache; downloads nothing.

    Raises:
        DataError: a data file cannot be read.
    """
    return _format_plan([*_what_is_trained(cfg), *_clock(cfg), *_resources(cfg)])


def describe_supervised_plan(cfg: SupervisedConfig) -> str:
    """Return the plan of a run on fixed data, as `describe_plan`; DataError if a data file cannot be read."""
    trainer, data = cfg.trainer, cfg.data
    role: Literal["policy", "reward"] = "reward" if isinstance(cfg, RewardConfig) else "policy"
    models = [_trained_model(role, trainer.policy.model, trainer.seed)]
    lines = [*_describe_model(models[0])]
    if isinstance(trainer, DPOTrainerConfig):
        if trainer.policy_is_reference:
            lines.append(("reference", "the policy without its adapter"))
        else:
            models.append(_reference(trainer.ref.model.path, trainer.policy.model))
            lines += _describe_model(models[1])
        dpo = trainer.dpo
        smoothing = f" · label smoothing {dpo.label_smoothing:g}" if dpo.label_smoothing else ""
        lines.append(("loss", f"{dpo.loss_type} · beta {dpo.beta:g}{smoothing}"))
    lines.append(("train data", _describe_sources(data.train_data)))
    if data.val_data and trainer.eval_interval > 0:
        lines.append(("val data", _describe_sources(data.val_data)))
    lines.append(_steps(trainer, data.train_data))
    unit = "pair" if isinstance(data, PreferenceDataConfig) else "row"
    length = data.row_length(read_context_length(trainer.policy.model.path))
    lines.append(("each step", f"{_count(trainer.train_batch_size, unit)} of ≤ {_count(length, 'token')}"))
    optimizer = trainer.policy.optimizer_config
    lines.append(
        ("optimizer", f"AdamW · lr {optimizer.lr:g} · {optimizer.scheduler} · decay {optimizer.weight_decay:g}")
    )
    from skyrl_train.launch.torchrun import Torchrun  # imports torch, as `_device`

    torchrun, ranks = Torchrun.find(), _ranks(trainer.placement, models)
    if torchrun is not None:
        torchrun.check(trainer.placement)
        processes = f"{torchrun.size} of torchrun"
        ranks = {model.role: (1, torchrun.size) for model in models} if torchrun.size > 1 else {}
    elif ranks:
        processes = _describe_processes(ranks)
    else:
        processes = "1"
    lines += [_device(), ("processes", processes)]
    lines += _storage(trainer, models, data.train_data, "activations", ranks)
    return _format_plan(lines)


def _format_plan(lines: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<13}{value}".rstrip() for name, value in lines)


def _describe_model(model: PlannedModel) -> Iterator[tuple[str, str]]:
    size = f"{model.n_parameters:,} parameters" if model.n_parameters else "size unknown before the download"
    yield model.role, f"{model.path} · {size} · {model.dtype}"
    if model.lora is not None:
        lora = model.lora
        kind = f"rank {lora.rank}, alpha {lora.alpha}" if lora.lora_path is None else f"of {lora.lora_path}"
        size = f"{model.n_trained:,} trained parameters" if model.n_trained else "size unknown before the download"
        yield "", f"LoRA {kind} · {size} · float32"


def _what_is_trained(cfg: SkyRLConfig) -> Iterator[tuple[str, str]]:
    trainer = cfg.trainer
    for model in plan_models(cfg):
        yield from _describe_model(model)
    if reads_reference(trainer.algorithm) and trainer.policy_is_reference:
        yield "reference", "the policy without its adapter"
    if (path := cfg.generator.reward_model.path) is not None:
        yield "reward model", path
    algorithm = trainer.algorithm
    yield "algorithm", f"{algorithm.advantage_estimator} · {algorithm.policy_loss_type} · {algorithm.loss_reduction}"
    yield "environment", f"{cfg.environment.env_class}, unless a row has its own env_class"
    if cfg.data.custom_cls.path is not None:
        yield "data", f"{cfg.data.custom_cls.name} of {cfg.data.custom_cls.path}"
        return
    yield "train data", _describe_sources(cfg.data.train_data)
    if cfg.data.val_data and trainer.eval_interval > 0:
        yield "val data", _describe_sources(cfg.data.val_data)


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
        width = BYTES["float32" if self.lora else self.dtype]
        return (self.n_trained or 0) * width * COPIES_IN_CHECKPOINT

    @property
    def weight_bytes(self) -> int:
        """Size of the weights."""
        return (self.n_parameters or 0) * BYTES[self.dtype]

    @property
    def training_bytes(self) -> int:
        """Memory for weights, gradients and optimizer state."""
        width = BYTES["float32" if self.lora else self.dtype]
        frozen = self.weight_bytes if self.lora or self.role == "reference" else 0
        return (self.n_trained or 0) * width * COPIES_WHEN_TRAINED + frozen


def plan_models(cfg: SkyRLConfig) -> list[PlannedModel]:
    """Return each model that the run loads; ConfigError if an adapter does not fit."""
    trainer = cfg.trainer
    models = [_trained_model("policy", trainer.policy.model, trainer.seed)]
    if trainer.critic.model.path is not None:
        models.append(_trained_model("critic", trainer.critic.model, trainer.seed))
    if reads_reference(trainer.algorithm) and not trainer.policy_is_reference:
        models.append(_reference(trainer.ref.model.path, trainer.policy.model))
    return models


def _reference(path: str, policy: PolicyModelConfig) -> PlannedModel:
    return PlannedModel("reference", path, policy.dtype, None, count_parameters(path))


def _trained_model(
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


def _clock(cfg: SkyRLConfig) -> Iterator[tuple[str, str]]:
    trainer, generator = cfg.trainer, cfg.generator
    n_prompts, n_samples = trainer.train_batch_size, generator.n_samples_per_prompt
    n_updates = trainer.update_epochs_per_batch * (n_prompts // trainer.policy_mini_batch_size)
    if cfg.data.custom_cls.path is not None:
        yield "steps", str(trainer.max_training_steps or "unknown before the class is loaded")
    else:
        yield _steps(trainer, cfg.data.train_data)
    yield (
        "each step",
        (
            f"{n_prompts:,} prompts × {n_samples} samples = {n_prompts * n_samples:,} trajectories, "
            f"{_count(n_updates, 'optimizer step')}"
        ),
    )
    n_tokens = generator.sampling_params.max_generate_length
    yield (
        "trajectories",
        f"≤ {_count(generator.max_turns, 'turn')} of ≤ {_count(n_tokens, 'token')} after a prompt of "
        f"≤ {_count(trainer.max_prompt_length, 'token')}",
    )
    if cfg.data.val_data and trainer.eval_interval > 0:
        yield (
            "evaluation",
            (
                f"{_count(generator.eval_n_samples_per_prompt, 'sample')} per validation prompt, every "
                f"{_count(trainer.eval_interval, 'step')}"
            ),
        )


def _n_steps(trainer: TrainerConfig | SFTTrainerConfig, sources: Sequence[str]) -> int | None:
    """Return the steps of a run; None before its data is downloaded."""
    counts = [count_rows(source) for source in sources]
    if None in counts or not counts:
        return trainer.max_training_steps
    n_steps = trainer.epochs * (sum(filter(None, counts)) // trainer.train_batch_size)
    return min(n_steps, trainer.max_training_steps or n_steps)


def _steps(trainer: TrainerConfig | SFTTrainerConfig, sources: list[str]) -> tuple[str, str]:
    n_steps = _n_steps(trainer, sources)
    counts = [count_rows(source) for source in sources]
    if n_steps is None or None in counts:
        return "steps", str(n_steps or "unknown before the download")
    per_epoch = sum(filter(None, counts)) // trainer.train_batch_size
    return "steps", f"{n_steps:,} of {_count(trainer.epochs, 'epoch')} with {_count(per_epoch, 'batch')}"


def _device() -> tuple[str, str]:
    import torch  # takes a second, which a mistake in the configuration should not cost

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        device = torch.cuda.get_device_name()
    else:
        free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
        device = f"CPU, {torch.get_num_threads()} threads"
    return "device", f"{device} · {format_bytes(free)} of {format_bytes(total)} free"


def _resources(cfg: SkyRLConfig) -> Iterator[tuple[str, str]]:
    models, placement = plan_models(cfg), cfg.trainer.placement
    yield _device()
    ranks = _ranks(placement, models)
    if ranks:
        n_engines = cfg.generator.n_local_engines
        own = "the engine has its own device" if n_engines == 1 else "each engine has its own device"
        sharing = "all share the policy's devices" if placement.colocate_all or not n_engines else own
        yield "processes", f"{_describe_processes(ranks, n_engines)} · {sharing}"
    else:
        yield "processes", "1: training and generation in this one"
    yield "engine", _describe_engine(cfg)
    sources = [] if cfg.data.custom_cls.path is not None else cfg.data.train_data
    on_top = "activations and the key-value cache"
    yield from _storage(cfg.trainer, models, sources, on_top, ranks, has_engine=cfg.generator.run_engines_locally)


@dataclass(frozen=True, slots=True)
class DiskForecast:
    """The disk that checkpoints and exports of a run take."""

    checkpoint_bytes: int
    interval: int
    n_kept: int | None  # at most; None if all are kept
    n_checkpoints: int | None  # in the whole run; None before the data is downloaded
    export_bytes: int
    n_exports: int | None

    @property
    def min_bytes(self) -> int:
        """The disk without which a checkpoint, or an export beside it, cannot be written."""
        return 2 * self.checkpoint_bytes + (self.export_bytes if self.n_exports != 0 else 0)

    @property
    def total_bytes(self) -> int:
        """The maximum of the whole run, if its length is known, with the checkpoint that is being written."""
        n_checkpoints = 1 if self.n_checkpoints is None else self.n_checkpoints
        n_kept = n_checkpoints if self.n_kept is None else min(self.n_kept, n_checkpoints)
        n_there = min(n_kept + 1, max(n_checkpoints, 2)) if self.checkpoint_bytes else 0
        return n_there * self.checkpoint_bytes + (self.n_exports or 0) * self.export_bytes

    def describe(self) -> str:
        """Return the forecast in one line."""
        parts = []
        if self.checkpoint_bytes:
            kept = "all kept" if self.n_kept is None else f"the last {self.n_kept} kept"
            every = _count(self.interval, "step")
            parts.append(f"{format_bytes(self.checkpoint_bytes)} per checkpoint, every {every}, {kept}")
        if self.export_bytes:
            n_exports = "" if self.n_exports is None else f"{self.n_exports:,} × "
            parts.append(f"exports {n_exports}{format_bytes(self.export_bytes)}")
        if self.n_checkpoints is not None:
            parts.append(f"up to {format_bytes(self.total_bytes)}")
        return " · ".join(parts) or "no checkpoints and no exports"


def forecast_disk(
    trainer: TrainerConfig | SFTTrainerConfig, models: Sequence[PlannedModel], sources: Sequence[str]
) -> DiskForecast | None:
    """Forecast the disk of a run on the data of `sources`; None if the size of a model is unknown."""
    if any(model.n_parameters is None for model in models):
        return None
    n_steps = _n_steps(trainer, sources)

    def times(interval: int) -> int | None:
        return 0 if interval < 0 else None if n_steps is None else math.ceil(n_steps / interval)

    is_saved = trainer.ckpt_interval > 0
    n_kept = 1 if trainer.remote_ckpt_url is not None and trainer.max_ckpts_to_keep < 0 else trainer.max_ckpts_to_keep
    trained = [model for model in models if model.role != "reference"]
    return DiskForecast(
        checkpoint_bytes=sum(model.checkpoint_bytes for model in trained) if is_saved else 0,
        interval=trainer.ckpt_interval,
        n_kept=None if n_kept < 0 else n_kept,
        n_checkpoints=times(trainer.ckpt_interval),
        export_bytes=sum(map(_export_bytes, trained)) if trainer.hf_save_interval > 0 else 0,
        n_exports=times(trainer.hf_save_interval),
    )


def _export_bytes(model: PlannedModel) -> int:
    if model.lora is None or model.lora.merge_on_export:
        return model.weight_bytes
    return model.checkpoint_bytes // COPIES_IN_CHECKPOINT


def free_bytes(folder: str) -> int:
    """Return the free bytes on the disk of a folder that need not exist."""
    return shutil.disk_usage(_existing_parent(Path(folder))).free


def _describe_engine(cfg: SkyRLConfig) -> str:
    generator = cfg.generator
    names = {"vllm": "vLLM", "sglang": "SGLang"}
    if not generator.run_engines_locally:
        return f"{names[generator.backend]} at {', '.join(generator.remote_inference_engine_urls)}"
    if generator.backend in names:
        engine = names[generator.backend]
    else:
        sharing = "with a copy of" if cfg.trainer.placement.uses_ray else "shares"
        engine = f"embedded, {sharing} the policy's weights"
    return f"{engine} · {generator.gpu_memory_utilization:.0%} of the memory that training leaves free"


def _storage(
    trainer: TrainerConfig | SFTTrainerConfig,
    models: Sequence[PlannedModel],
    sources: Sequence[str],
    and_on_top: str,
    ranks: Ranks,
    *,
    has_engine: bool = False,
) -> Iterator[tuple[str, str]]:
    """Yield memory, disk and run folder of a run that loads `models`, with `ranks` if it takes several processes."""
    if any(model.n_parameters is None for model in models):
        yield "memory", "unknown before the download"
    else:
        yield (
            "memory",
            (
                f"{format_bytes(sum(model.training_bytes for model in models))} for weights, gradients and optimizer; "
                f"{and_on_top} come on top"
            ),
        )
        if ranks:
            shards = (f"{m.role} {format_bytes(m.training_bytes / math.prod(ranks[m.role]))}" for m in models)
            engine = f"; engine {format_bytes(models[0].weight_bytes)}" if has_engine else ""
            yield "per process", f"{', '.join(shards)}{engine}"
        forecast = forecast_disk(trainer, models, sources)
        if forecast is not None and forecast.total_bytes:
            yield "disk", f"{forecast.describe()} · {format_bytes(free_bytes(trainer.ckpt_path))} free"
    yield "run folder", trainer.run_dir


def _ranks(placement: RunPlacementConfig, models: Sequence[PlannedModel]) -> Ranks:
    """Return nodes, and ranks per node, of each model; nothing for a run in one process."""
    if not placement.uses_ray:
        return {}
    return {model.role: placement.size(ROLES[model.role]) for model in models}


def _describe_processes(ranks: Ranks, n_engines: int = 0) -> str:
    """Return the number of processes on Ray: the driver, the engines, and the ranks."""
    engines = {0: "", 1: "engine, "}.get(n_engines, f"{n_engines} engines, ")
    parts = ", ".join(f"{role} {n_nodes} × {n_per_node}" for role, (n_nodes, n_per_node) in ranks.items())
    n_processes = 1 + n_engines + sum(map(math.prod, ranks.values()))
    return f"{n_processes} on Ray: this one, {engines}ranks (nodes × per node) {parts}"


def count_parameters(path: str) -> int | None:
    """Return the number of parameters of a model in a local folder or in the Hub's cache, None if it is in neither."""
    folder = Path(path)
    if not folder.is_dir():
        cached = try_to_load_from_cache(path, "config.json") if path.count("/") <= 1 else None
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    n_parameters = 0
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118, not a mapping
                    size = 1
                    for length in tensors.get_slice(name).get_shape():
                        size *= length
                    n_parameters += size
        except (OSError, SafetensorError):
            return None
    return n_parameters or None


def _describe_sources(sources: list[str]) -> str:
    counts = ((source, count_rows(source)) for source in sources)
    return ", ".join(f"{source} ({'a Hub dataset' if n is None else _count(n, 'row')})" for source, n in counts)


def _count(n: int, noun: str) -> str:
    plural = noun if n == 1 else f"{noun}es" if noun.endswith("ch") and noun != "epoch" else f"{noun}s"
    return f"{n:,} {plural}"


def _existing_parent(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def format_bytes(n_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"
