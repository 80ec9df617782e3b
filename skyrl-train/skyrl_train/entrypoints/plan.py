"""The plan of a run before anything is loaded: model, data, steps, devices, memory and disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from skyrl_train.algorithms.rules import reads_reference
from skyrl_train.config import SkyRLConfig, TrainerConfig
from skyrl_train.config.run import RunConfig
from skyrl_train.config.sft import SFTConfig, SFTTrainerConfig
from skyrl_train.dataset.files import count_rows

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


def describe_sft_plan(cfg: SFTConfig) -> str:
    """Return the plan of supervised fine-tuning, as `describe_plan`; DataError if a data file cannot be read."""
    trainer, data, path = cfg.trainer, cfg.data, cfg.trainer.policy.model.path
    n_parameters, dtype = count_parameters(path), trainer.policy.model.dtype
    lines = [("policy", _describe_model(path, n_parameters, dtype)), ("train data", _describe_sources(data.train_data))]
    if data.val_data and trainer.eval_interval > 0:
        lines.append(("val data", _describe_sources(data.val_data)))
    lines.append(_steps(trainer, data.train_data))
    lines.append(("each step", f"{_count(trainer.train_batch_size, 'row')} of ≤ {_count(data.max_length, 'token')}"))
    optimizer = trainer.policy.optimizer_config
    lines.append(
        ("optimizer", f"AdamW · lr {optimizer.lr:g} · {optimizer.scheduler} · decay {optimizer.weight_decay:g}")
    )
    lines.append(_device())
    weights = None if n_parameters is None else n_parameters * BYTES[dtype]
    lines += _storage(trainer, weights)
    return _format_plan(lines)


def _format_plan(lines: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<13}{value}".rstrip() for name, value in lines)


def _describe_model(path: str, n_parameters: int | None, dtype: str) -> str:
    size = "size unknown before the download" if n_parameters is None else f"{n_parameters:,} parameters"
    return f"{path} · {size} · {dtype}"


def _what_is_trained(cfg: SkyRLConfig) -> Iterator[tuple[str, str]]:
    trainer = cfg.trainer
    for role, path, dtype in _models(cfg):
        yield role, _describe_model(path, count_parameters(path), dtype)
    algorithm = trainer.algorithm
    yield "algorithm", f"{algorithm.advantage_estimator} · {algorithm.policy_loss_type} · {algorithm.loss_reduction}"
    yield "environment", f"{cfg.environment.env_class}, unless a row has its own env_class"
    if cfg.data.custom_cls.path is not None:
        yield "data", f"{cfg.data.custom_cls.name} of {cfg.data.custom_cls.path}"
        return
    yield "train data", _describe_sources(cfg.data.train_data)
    if cfg.data.val_data and trainer.eval_interval > 0:
        yield "val data", _describe_sources(cfg.data.val_data)


def _models(cfg: SkyRLConfig) -> list[tuple[str, str, str]]:
    """Return role, path and dtype of each model that the run loads."""
    trainer = cfg.trainer
    models: list[tuple[str, str, str]] = [("policy", trainer.policy.model.path, trainer.policy.model.dtype)]
    if trainer.critic.model.path is not None:
        models.append(("critic", trainer.critic.model.path, trainer.critic.model.dtype))
    if reads_reference(trainer.algorithm):
        models.append(("reference", trainer.ref.model.path, trainer.policy.model.dtype))
    return models


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


def _steps(trainer: TrainerConfig | SFTTrainerConfig, sources: list[str]) -> tuple[str, str]:
    counts = [count_rows(source) for source in sources]
    if None in counts:
        return "steps", str(trainer.max_training_steps or "unknown before the download")
    per_epoch = sum(filter(None, counts)) // trainer.train_batch_size
    n_steps = min(trainer.epochs * per_epoch, trainer.max_training_steps or trainer.epochs * per_epoch)
    return "steps", f"{n_steps:,} of {_count(trainer.epochs, 'epoch')} with {_count(per_epoch, 'batch')}"


def _device() -> tuple[str, str]:
    import torch  # takes a second, which a mistake in the configuration should not cost

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        device = torch.cuda.get_device_name()
    else:
        free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
        device = f"CPU, {torch.get_num_threads()} threads"
    return "device", f"{device} · {_format_bytes(free)} of {_format_bytes(total)} free · one process"


def _resources(cfg: SkyRLConfig) -> Iterator[tuple[str, str]]:
    yield _device()
    engine = "vLLM" if cfg.generator.backend == "vllm" else "embedded, shares the policy's weights"
    yield "engine", f"{engine} · {cfg.generator.gpu_memory_utilization:.0%} of the memory that training leaves free"
    counts = {role: (count_parameters(path), BYTES[dtype]) for role, path, dtype in _models(cfg)}
    if any(n is None for n, _ in counts.values()):
        yield from _storage(cfg.trainer, None)
    else:
        n_bytes = {role: (n or 0) * width for role, (n, width) in counts.items()}
        frozen = n_bytes.pop("reference", 0)
        yield from _storage(
            cfg.trainer, sum(n_bytes.values()), frozen, and_on_top="activations and the key-value cache"
        )


def _storage(
    trainer: RunConfig, weights: int | None, frozen: int = 0, and_on_top: str = "activations"
) -> Iterator[tuple[str, str]]:
    """Yield memory, disk and run folder for `weights` bytes that are trained and `frozen` bytes that are not."""
    if weights is None:
        yield "memory", "unknown before the download"
    else:
        yield (
            "memory",
            (
                f"{_format_bytes(weights * COPIES_WHEN_TRAINED + frozen)} for weights, gradients and optimizer; "
                f"{and_on_top} come on top"
            ),
        )
        if trainer.ckpt_interval > 0:
            free_disk = shutil.disk_usage(_existing_parent(Path(trainer.ckpt_path))).free
            kept = "all kept" if trainer.max_ckpts_to_keep < 0 else f"the last {trainer.max_ckpts_to_keep} kept"
            yield (
                "disk",
                (
                    f"{_format_bytes(weights * COPIES_IN_CHECKPOINT)} per checkpoint, every "
                    f"{_count(trainer.ckpt_interval, 'step')}, {kept} · {_format_bytes(free_disk)} free"
                ),
            )
    yield "run folder", trainer.run_dir


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


def _format_bytes(n_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"
