"""The plan of a run before anything is loaded: model, data, steps, devices, memory and disk."""

import logging
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from skyrl_train.algorithms.rules import reads_reference
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.base import value_at
from skyrl_train.config.supervised import DPOTrainerConfig, PreferenceDataConfig, SupervisedConfig
from skyrl_train.dataset.files import count_rows
from skyrl_train.entrypoints.memory_plan import forecast_here, plan_run, warn_of_shortage
from skyrl_train.entrypoints.preflight import read_context_length
from skyrl_train.errors import CheckpointError
from skyrl_train.plan import RunPlan, TrainingPlan
from skyrl_train.plan.forecast import PlannedModel, format_bytes, format_count, free_bytes
from skyrl_train.plan.run_plan import Ranks
from skyrl_train.types.specs import lora_spec

logger = logging.getLogger(__name__)


def describe_plan(plan: RunPlan) -> str:
    """Return the plan of a training run, one `name  value` line per fact. Downloads nothing.

    Raises:
        ConfigError: an adapter does not fit its model, or Megatron-Core does not support a model or adapter.
        DataError: a data file cannot be read.
    """
    cfg, trainer, generator = plan.cfg, plan.cfg.trainer, plan.cfg.generator
    _check_megatron(plan)
    lines = [line for model in plan.models for line in _describe_model(model)]
    if reads_reference(trainer.algorithm) and trainer.policy_is_reference:
        lines.append(("reference", "the policy without its adapter"))
    elif reads_reference(trainer.algorithm) and trainer.ref.shares_adapter_with(trainer.policy.model):
        lines.append(("", f"with the adapter of {trainer.policy.model.lora.lora_path}"))
    if (path := generator.reward_model.path) is not None:
        lines.append(("reward model", path))
    algorithm, environment = trainer.algorithm, cfg.environment.env_class
    lines += [
        ("algorithm", f"{algorithm.advantage_estimator} · {algorithm.policy_loss_type} · {algorithm.loss_reduction}"),
        ("environment", f"{environment}, unless a row has its own env_class"),
    ]
    has_evaluations = cfg.data.val_data and trainer.eval_interval > 0
    if cfg.data.custom_cls.path is not None:
        lines.append(("data", f"{cfg.data.custom_cls.name} of {cfg.data.custom_cls.path}"))
        lines.append(("steps", str(trainer.max_training_steps or "unknown before the class is loaded")))
    else:
        lines += _describe_data(plan)
    n_prompts, n_samples = trainer.train_batch_size, generator.n_samples_per_prompt
    n_updates = trainer.update_epochs_per_batch * (n_prompts // trainer.policy_mini_batch_size)
    size = f"{n_prompts:,} prompts × {n_samples} samples = {n_prompts * n_samples:,} trajectories"
    lines.append(("each step", f"{size}, {format_count(n_updates, 'optimizer step')}"))
    if trainer.fully_async.enabled and (n_steps := trainer.fully_async.max_staleness_steps):
        lines.append(("", f"generated up to {format_count(n_steps, 'step')} ahead, off-policy"))
    turns = format_count(generator.max_turns, "turn")
    n_tokens, n_prompt_tokens = generator.sampling_params.max_generate_length, trainer.max_prompt_length
    limits = f"{format_count(n_tokens, 'token')} after a prompt of ≤ {format_count(n_prompt_tokens, 'token')}"
    lines.append(("trajectories", f"≤ {turns} of ≤ {limits}"))
    if has_evaluations:
        samples = format_count(generator.eval_n_samples_per_prompt, "sample")
        interval = format_count(trainer.eval_interval, "step")
        lines.append(("evaluation", f"{samples} per validation prompt, every {interval}"))
    return _format_plan([*lines, *_describe_resources(plan)])


def describe_supervised_plan(plan: TrainingPlan) -> str:
    """Return the plan of a run on fixed data, in the format of `describe_plan`. Raises the same errors."""
    assert isinstance(plan.cfg, SupervisedConfig)
    trainer, data = plan.cfg.trainer, plan.cfg.data
    lines = [line for model in plan.models for line in _describe_model(model)]
    if isinstance(trainer, DPOTrainerConfig):
        if trainer.policy_is_reference:
            lines.append(("reference", "the policy without its adapter"))
        dpo = trainer.dpo
        smoothing = f" · label smoothing {dpo.label_smoothing:g}" if dpo.label_smoothing else ""
        lines.append(("loss", f"{dpo.loss_type} · beta {dpo.beta:g}{smoothing}"))
    _check_megatron(plan)
    lines += _describe_data(plan)
    unit = "pair" if isinstance(data, PreferenceDataConfig) else "row"
    rows = format_count(trainer.train_batch_size, unit)
    length = data.row_length(read_context_length(trainer.policy.model.path))
    lines.append(("each step", f"{rows} of ≤ {format_count(length, 'token')}"))
    optimizer = trainer.policy.optimizer_config
    lines.append(
        (
            "optimizer",
            f"{optimizer.name} · lr {optimizer.lr:g} · {optimizer.scheduler} · decay {optimizer.weight_decay:g}",
        )
    )
    from skyrl_train.launch.torchrun import Torchrun  # imports torch, as `_describe_device`

    torchrun, ranks = Torchrun.find(), plan.ranks
    if torchrun is not None:
        torchrun.check(trainer.placement)
        processes = f"{torchrun.size} of torchrun"
        ranks = dict.fromkeys(plan.roles, (1, torchrun.size)) if torchrun.size > 1 else {}
    elif trainer.placement.uses_torchrun:
        processes = f"{math.prod(trainer.placement.size('policy'))} of torchrun"
    elif ranks:
        processes = _describe_processes(plan)
    else:
        processes = "1"
    lines += [_describe_device(), ("processes", processes), *_describe_storage(plan, ranks)]
    return _format_plan(lines)


def _check_megatron(plan: TrainingPlan) -> None:
    """Raise ConfigError if Megatron-Core cannot compute a model that is on this machine, or its adapter."""
    trainer = plan.cfg.trainer
    if not trainer.strategy_traits.is_model_parallel:
        return
    from skyrl_train.distributed.megatron.strategy import configure  # imports torch, as `_describe_device`
    from skyrl_train.models.loading import create_empty

    for planned in plan.models:
        if planned.n_parameters is not None:
            key = "trainer.ref" if planned.role == "ref" else "trainer.policy"
            section = value_at(trainer, key.removeprefix("trainer."))
            lora = lora_spec(section.model, f"{key}.model.lora", trainer.seed) if planned.lora is not None else None
            model = create_empty(planned.path, planned.role, local_files_only=True)
            configure(model, f"the model {planned.path}", section.megatron_config, key, lora)


def _format_plan(lines: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<13}{value}".rstrip() for name, value in lines)


def _describe_model(model: PlannedModel) -> Iterator[tuple[str, str]]:
    size = f"{model.n_parameters:,} parameters" if model.n_parameters else "size unknown before the download"
    is_converted = model.dtype != model.train_dtype and model.lora is None and model.role != "ref"
    yield (
        model.name,
        f"{model.path} · {size} · {model.dtype}{f', trained in {model.train_dtype}' if is_converted else ''}",
    )
    if model.lora is not None:
        lora = model.lora
        kind = f"rank {lora.rank}, alpha {lora.alpha}" if lora.lora_path is None else f"of {lora.lora_path}"
        size = f"{model.n_trained:,} trained parameters" if model.n_trained else "size unknown before the download"
        yield "", f"LoRA {kind} · {size} · float32"


def _describe_data(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    trainer, data, n_batches, n_steps = plan.cfg.trainer, plan.cfg.data, plan.n_batches, plan.n_steps
    yield "train data", _describe_sources(data.train_data, data.max_checked_rows)
    if data.val_data and trainer.eval_interval > 0:
        yield "val data", _describe_sources(data.val_data)
    if n_steps is None or n_batches is None:
        yield "steps", str(n_steps or "unknown before the download")
        return
    total = trainer.epochs * n_batches
    limited = "" if n_steps == total else f" of {total:,}"
    epochs, batches = format_count(trainer.epochs, "epoch"), format_count(n_batches, "batch")
    yield "steps", f"{n_steps:,}{limited} ({epochs} × {batches})"


def _describe_device() -> tuple[str, str]:
    import torch  # slow, so only after the configuration is checked

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        device = torch.cuda.get_device_name()
    else:
        free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
        device = f"CPU, {torch.get_num_threads()} threads"
    return "device", f"{device} · {format_bytes(free)} of {format_bytes(total)} free"


def _describe_resources(plan: RunPlan) -> Iterator[tuple[str, str]]:
    generator, ranks = plan.cfg.generator, plan.ranks
    n_engines, n_devices = generator.n_local_engines, generator.n_devices_per_engine
    yield _describe_device()
    if ranks:
        sharing = "all share the policy's devices"
        if not plan.cfg.trainer.placement.colocate_all and n_engines:
            devices = "its own device" if n_devices == 1 else f"its own {n_devices} devices"
            sharing = f"{'the' if n_engines == 1 else 'each'} engine has {devices}"
        sharing += ", and are offloaded while idle" if plan.offloads_idle else ""
        yield "processes", f"{_describe_processes(plan, n_engines)} · {sharing}"
    elif plan.cfg.has_engine_process:
        yield "processes", "2: training in this one, generation in the other"
    else:
        yield "processes", "1: training and generation in this one"
    name = generator.engine.label
    if generator.engine.is_embedded:
        name = f"embedded, {'with a copy of' if plan.has_engine_copy else 'shares'} the policy's weights"
    elif generator.engine.has_samplers and generator.run_engines_locally:
        name += f" with {generator.choose_sampler(has_gpu=plan.has_gpus)} sampling"
    rest = "beside the policy's weights" if plan.offloads_idle else "that training leaves free"
    if servers := generator.remote_inference_engine_urls:
        yield "engine", f"{name} at {', '.join(servers)}"
    else:
        yield "engine", f"{name} · {generator.gpu_memory_utilization:.0%} of the memory {rest}"
    yield from _describe_storage(plan, ranks)


def _describe_storage(plan: TrainingPlan, ranks: Ranks) -> Iterator[tuple[str, str]]:
    """Yield memory, disk and run folder of a run, with `ranks` if it takes several processes."""
    trainer, models = plan.cfg.trainer, plan.models
    if not plan.has_known_sizes:
        yield "memory", "unknown before the download"
    else:
        n_bytes = format_bytes(sum(model.training_bytes for model in models))
        yield "memory", f"{n_bytes} for weights, gradients and optimizer"
        if ranks:
            shards = (f"{m.name} {format_bytes(m.training_bytes / plan.count_shards(m, ranks))}" for m in models)
            engine = f"; engine {format_bytes(plan.engine_bytes)}" if plan.engine_bytes else ""
            yield "per process", f"{', '.join(shards)}{engine}"
        if (memory := forecast_here(plan)) is not None:
            for place in memory.places:
                phase, peak = memory.peak(place)
                where = "the GPU" if place == "device" else "the host"
                free = format_bytes(memory.capacity(place))
                yield "", f"{format_bytes(peak)} of {where} at the peak ({phase}), {free} free; details: skyrl plan"
        if (disk := plan.forecast_disk()) is not None and disk.total_bytes:
            yield "disk", f"{disk.describe()} · {format_bytes(free_bytes(trainer.ckpt_path))} free"
    yield "run folder", trainer.run_dir


def _describe_processes(plan: TrainingPlan, n_engines: int = 0) -> str:
    """Return the number of processes on Ray: the driver, the engines, and the ranks."""
    engines = {0: "", 1: "engine, "}.get(n_engines, f"{n_engines} engines, ")
    sizes = {model.name: plan.ranks[model.role] for model in plan.models}
    parts = ", ".join(f"{name} {n_nodes} × {n_per_node}" for name, (n_nodes, n_per_node) in sizes.items())
    n_processes = 1 + n_engines + sum(map(math.prod, sizes.values()))
    return f"{n_processes} on Ray: this one, {engines}ranks (nodes × per node) {parts}"


def _describe_sources(sources: list[str], max_checked_rows: int | None = None) -> str:
    counts = {source: count_rows(source) for source in sources}
    parts = [f"{source} ({'a Hub dataset' if n is None else format_count(n, 'row')})" for source, n in counts.items()]
    if max_checked_rows is not None and sum(filter(None, counts.values())) > max_checked_rows:
        parts.append(f"a sample of {format_count(max_checked_rows, 'row')} checked")
    return ", ".join(parts)


def print_plan(cfg: SkyRLConfig | SupervisedConfig, *, is_custom: bool) -> None:
    """Print the plan of a run. Raise an error if memory or disk is too small, or all prompts are too long.

    An `is_custom` experiment may load other models and read other data, so only the disk is checked.
    """
    longest_prompt = None
    if isinstance(cfg, SkyRLConfig) and not is_custom:
        from skyrl_train.entrypoints.prompts import check_prompts

        longest_prompt = check_prompts(cfg)
    plan = plan_run(cfg, longest_prompt=longest_prompt)
    print(describe_plan(plan) if isinstance(plan, RunPlan) else describe_supervised_plan(plan))
    if (disk := plan.forecast_disk()) is not None and disk.checkpoint_bytes:
        from skyrl_train.checkpoint import CheckpointStore  # imports torch, as `_describe_device`

        if shortage := CheckpointStore(Path(cfg.trainer.ckpt_path)).find_shortage(disk.checkpoint_bytes):
            raise CheckpointError(shortage)  # as the run does after loading its models
    if not is_custom:
        warn_of_shortage(plan)
