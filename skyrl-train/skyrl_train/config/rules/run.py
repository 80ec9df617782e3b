"""Rules for all kinds of runs: outputs, trackers, optimizers and adapters."""

import netrc
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skyrl_train.config.base import changed_fields, value_at
from skyrl_train.config.problems import FIELDS, show
from skyrl_train.config.root import SkyRLConfig

WITHOUT_EFFECT = {
    "generator.async_engine": "engines are always asynchronous",
    "trainer.flash_attn": "attention is always PyTorch's SDPA, which uses a flash kernel on a GPU where it can",
}
"""SkyRL keys that have no effect here, with the reason."""


def _trained_sections(cfg: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, settings) of a section such as `optimizer_config` for each trained model."""
    for role in ("policy", "critic"):
        if hasattr(cfg.trainer, role):  # supervised runs have no critic
            key = f"trainer.{role}.{name}"
            yield key, value_at(cfg, key)


def optimizers_can_learn(cfg: Any) -> Iterator[str]:
    """Reject a warm-up in both steps and as a fraction, and a weight decay that erases or flips the weights."""
    for key, optimizer in _trained_sections(cfg, "optimizer_config"):
        if optimizer.num_warmup_steps and optimizer.warmup_ratio:
            yield (
                f"{key}.num_warmup_steps={optimizer.num_warmup_steps} and {key}.warmup_ratio="
                f"{optimizer.warmup_ratio:g} both set the warm-up; set one of them to 0"
            )
        if optimizer.lr * optimizer.weight_decay >= 1:
            yield (
                f"{key}.weight_decay={optimizer.weight_decay:g} times {key}.lr={optimizer.lr:g} must be below 1, or a "
                f"step erases the weights; try {key}.weight_decay=0.01"
            )


def adapters_are_possible(cfg: Any) -> Iterator[str]:
    """Reject matrices for an adapter that is loaded from `lora_path`, and adapter dropout in reinforcement learning."""
    for key, lora in _trained_sections(cfg, "model.lora"):
        for name in changed_fields(lora) & {"target_modules", "exclude_modules"}:
            if lora.lora_path is not None:
                yield (
                    f"{key}.{name}={show(value_at(lora, name))}: the adapter in {key}.lora_path={show(lora.lora_path)} "
                    f"has its own matrices; remove {key}.{name}"
                )
        if lora.dropout > 0 and isinstance(cfg, SkyRLConfig):
            yield (
                f"{key}.dropout={lora.dropout:g} would make the log-probs of training random, unlike those of "
                f"sampling; set {key}.dropout=0"
            )


def bases_can_be_quantized(cfg: Any) -> Iterator[str]:
    """Reject settings that need the unquantized weights of a base in 4 bits, and strategies that split its matrices."""
    trainer = cfg.trainer
    for key, lora in _trained_sections(cfg, "model.lora"):
        if not (lora.is_used and lora.is_quantized):
            continue
        setting, fix = f"{key}.quantize_base={lora.quantize_base}", f"set {key}.quantize_base=none"
        if lora.merge_on_export:
            yield (
                f"{key}.merge_on_export=true needs the unquantized weights, which {setting} does not keep; set "
                f"{key}.merge_on_export=false and merge the exported adapter with skyrl merge adapter, or {fix}"
            )
        if trainer.strategy_traits.is_model_parallel:
            yield (
                f"{setting} does not work with trainer.strategy={trainer.strategy}, which splits matrices over ranks; "
                f"set trainer.strategy=fsdp2, or {fix}"
            )
        fsdp = key.replace("model.lora", "fsdp_config")
        if value_at(cfg, fsdp).cpu_offload:
            yield (
                f"{fsdp}.cpu_offload=true moves only parameters, and {setting} keeps the base on the device; set "
                f"{fsdp}.cpu_offload=false, or {fix}"
            )
        if isinstance(cfg, SkyRLConfig) and trainer.update_ref_every_epoch and key.startswith("trainer.policy"):
            yield (
                f"trainer.update_ref_every_epoch=true loads an unquantized reference, from which a policy with "
                f"{setting} differs before it is trained; set trainer.update_ref_every_epoch=false, or {fix}"
            )


def weights_can_be_short(cfg: Any) -> Iterator[str]:
    """Reject bfloat16 weights and optimizers that do not fit an adapter, and computing in another dtype."""
    for key, model in _trained_sections(cfg, "model"):
        optimizer_key = f"{key.removesuffix('model')}optimizer_config"
        optimizer = value_at(cfg, optimizer_key)
        if model.lora.is_used and model.train_dtype != "float32":
            yield (
                f"{key}.train_dtype={model.train_dtype} does not apply to an adapter, which is always float32; set "
                f"{key}.dtype={model.train_dtype} for the weights under it, and {key}.train_dtype=float32"
            )
        if model.lora.is_used and optimizer.name == "muon":
            yield (
                f"{optimizer_key}.name=muon is for whole matrices, not for the factors of an adapter; set "
                f"{optimizer_key}.name=adamw or adamw_8bit"
            )
        if optimizer.cpu_offload and optimizer.name == "muon":
            yield (
                f"{optimizer_key}.cpu_offload=true runs the step on the CPU, where the matrix products of "
                f"{optimizer_key}.name=muon would take minutes; set {optimizer_key}.name=adamw or adamw_8bit"
            )
        if model.train_dtype == "bfloat16" and not cfg.trainer.bf16:
            yield (
                f"trainer.bf16=false computes in float32, but {key}.train_dtype=bfloat16 computes in bfloat16; set "
                f"trainer.bf16=true, or {key}.train_dtype=float32"
            )


def settings_have_an_effect(cfg: Any) -> Iterator[str]:
    """Warn about settings that have no effect, e.g. of a disabled adapter or of disabled asynchronous training."""
    for key, reason in WITHOUT_EFFECT.items() if isinstance(cfg, SkyRLConfig) else ():
        if (value := value_at(cfg, key)) != FIELDS[key].get_default():
            yield f"{key}={show(value)} has no effect: {reason}"
    settings = cfg.trainer.fully_async if isinstance(cfg, SkyRLConfig) else None
    if settings is not None and not settings.enabled and (changed := sorted(changed_fields(settings))):
        key = f"trainer.fully_async.{changed[0]}"
        yield (
            f"{key}={show(value_at(settings, changed[0]))} has no effect without trainer.fully_async.enabled=true or a "
            f"FullyAsyncRayPPOTrainer; set trainer.fully_async.enabled=true, or remove {key}"
        )
    for key, lora in _trained_sections(cfg, "model.lora"):
        if not lora.is_used and (changed := sorted(changed_fields(lora))):
            yield (
                f"{key}.{changed[0]}={show(value_at(lora, changed[0]))} has no effect, because {key}.rank=0 turns the "
                f"adapter off; set {key}.rank=32, or remove {key}.{changed[0]}"
            )
    for key, optimizer in _trained_sections(cfg, "optimizer_config"):
        model = value_at(cfg, key.replace("optimizer_config", "model"))
        if not optimizer.stochastic_rounding and (model.train_dtype == "float32" or optimizer.cpu_offload):
            yield (
                f"{key}.stochastic_rounding=false has no effect on float32 weights; remove it, or set "
                f"{key.replace('optimizer_config', 'model')}.train_dtype=bfloat16 without {key}.cpu_offload"
            )
    if cfg.trainer.resume_path is not None and cfg.trainer.resume_mode != "from_path":
        yield (
            f"trainer.resume_path={show(cfg.trainer.resume_path)} is ignored when "
            f"trainer.resume_mode={cfg.trainer.resume_mode}; set trainer.resume_mode=from_path"
        )


def names_are_folders(cfg: Any) -> Iterator[str]:
    """Reject project and run names that are not safe as folder names."""
    for key in ("trainer.project_name", "trainer.run_name"):
        name: str = value_at(cfg, key)
        if not name.isprintable() or any(part.strip() in (".", "..") for part in name.split("/")):
            yield f"{key}={show(name)} must be the name of a folder, in printable characters; try {key}=catch"
        elif "::" in name:
            yield f"{key}={show(name)} would be a chain of URLs in remote storage; try {key}={name.replace('::', '-')}"


def resume_path_is_a_checkpoint(cfg: Any) -> Iterator[str]:
    """Reject `resume_mode=from_path` without the path of one checkpoint."""
    if cfg.trainer.resume_mode != "from_path":
        return
    path = cfg.trainer.resume_path
    if path is None:
        yield (
            "trainer.resume_mode=from_path needs trainer.resume_path=null to be a folder ending in global_step_<N>; "
            "set it, or trainer.resume_mode=latest"
        )
    elif not re.search(r"(^|/)global_step_\d+/?$", path):
        yield (
            f"trainer.resume_path={show(path)} must end in global_step_<N>; "
            f"try trainer.resume_path={path.rstrip('/')}/global_step_10, or trainer.resume_mode=latest"
        )


def uploads_have_files(cfg: Any) -> Iterator[str]:
    """Reject remote storage that is not a URL, or for which the run writes no files."""
    uploads = [
        (
            "trainer.remote_ckpt_url",
            cfg.trainer.ckpt_interval > 0,
            "needs checkpoints, but trainer.ckpt_interval=-1 writes none; set trainer.ckpt_interval=10, or "
            "trainer.remote_ckpt_url=null",
        )
    ]
    if isinstance(cfg, SkyRLConfig):
        fault = (
            "needs evaluation trajectories, but trainer.dump_eval_results=false writes none; set "
            "trainer.dump_eval_results=true"
        )
        uploads.append(("trainer.remote_trajectory_url", cfg.trainer.dump_eval_results, fault))
    for key, has_files, fault in uploads:
        if (url := value_at(cfg, key)) is None:
            continue
        if not re.match(r"[a-z0-9+.-]+://.", url):
            yield f"{key}={show(url)} must be a URL, e.g. {key}=s3://my-bucket, or null to upload nothing"
        if not has_files:
            yield f"{key}={show(url)} {fault}"


SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
"""Matches names of environment variables that probably hold secrets."""


def wandb_can_start(cfg: Any) -> Iterator[str]:
    """Reject Weights & Biases without its package or a login before any model is loaded."""
    if "wandb" in cfg.trainer.logger and (problem := find_wandb_problem(os.environ)):
        yield problem


def wandb_settings_have_a_run(cfg: Any) -> Iterator[str]:
    """Reject Weights & Biases settings without its logger, and uploads of secrets."""
    trainer = cfg.trainer
    for key, off in (("wandb_artifacts", False), ("wandb_environment", [])):
        if (value := getattr(trainer, key)) != off and "wandb" not in trainer.logger:
            yield (
                f"trainer.{key}={show(value)} needs wandb in trainer.logger={show(trainer.logger)}; add it, or set "
                f"trainer.{key}={show(off)}"
            )
    for name in trainer.wandb_environment:
        if SECRET.search(name):
            yield f"trainer.wandb_environment=[{name}] looks like a secret, which it would upload; remove {name}"


def find_wandb_problem(environ: Mapping[str, str]) -> str | None:
    """Return how to install wandb or log in, or None with an API key, a `wandb login`, or a mode that needs neither."""
    if find_spec("wandb") is None:
        return "trainer.logger=wandb needs the package wandb; pip install wandb, or set trainer.logger=tensorboard"
    if environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun") or environ.get("WANDB_API_KEY"):
        return None
    file = Path(environ.get("NETRC") or Path(environ.get("HOME", "")) / ".netrc")
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    with suppress(netrc.NetrcParseError):
        if file.is_file() and netrc.netrc(file).authenticators(host) is not None:
            return None
    return (
        "trainer.logger=wandb needs a login, and the variable WANDB_API_KEY is not set; do one of: "
        "export WANDB_API_KEY=<your key>, run `wandb login`, export WANDB_MODE=offline (no upload), "
        "or choose trainer.logger=tensorboard"
    )
