"""The inference engine of a run in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psutil
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.hf import HFEngine
from skyrl_train.models.memory import cache_bytes_per_token
from skyrl_train.types.specs import SyncKind
from skyrl_train.weight_sync import SyncOptions
from skyrl_train.weight_sync.base import Transport

FLOAT32_TOLERANCE, BF16_TOLERANCE = 1e-3, 0.1  # nats


def new_engine(
    cfg: SkyRLConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    reserved_bytes: int,
    executor: ThreadPoolExecutor | None,
) -> InferenceEngine:
    """Create an engine for the policy `model` that computes in `executor`, which has one thread.

    Its cache may use the free memory of this machine, less `reserved_bytes` that the trainer will allocate.
    """
    generator, has_gpu = cfg.generator, torch.cuda.is_available()
    free, total = _memory()
    usable = int(max(free - reserved_bytes, 0) * generator.gpu_memory_utilization)
    if generator.backend != "vllm":
        return HFEngine(
            model,
            tokenizer,
            max_num_seqs=generator.max_num_seqs,
            max_num_batched_tokens=generator.max_num_batched_tokens,
            max_cache_bytes=usable,
            bf16=cfg.trainer.bf16,
            executor=executor,
        )
    from skyrl_train.inference_engines.vllm import VLLMEngine

    context_length = model.config.get_text_config().max_position_embeddings
    max_bytes = generator.max_num_seqs * context_length * cache_bytes_per_token(model)
    return VLLMEngine(
        cfg.trainer.policy.model.path,
        tokenizer,
        dtype="bfloat16" if cfg.trainer.bf16 and has_gpu else cfg.trainer.policy.model.dtype,
        max_num_seqs=generator.max_num_seqs,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        gpu_memory_utilization=usable / total,
        max_cache_bytes=None if has_gpu else min(usable, max_bytes),  # a CPU allocates it at once
        enforce_eager=generator.enforce_eager,
        engine_init_kwargs=generator.engine_init_kwargs,
        executor=executor,
    )


def sync_kind(cfg: SkyRLConfig) -> SyncKind:
    """Return the kind of weight sync: the embedded engine computes with the adapter itself."""
    has_adapter = cfg.trainer.policy.model.lora.is_used and cfg.generator.backend != "vllm"
    return "adapter" if has_adapter else "full"


def sync_options(cfg: GeneratorConfig) -> SyncOptions:
    """Return the settings of weight syncs to other processes."""
    transports: dict[str, Transport] = {"auto": "auto", "shm": "shared_memory", "gloo": "broadcast"}
    return SyncOptions(
        transports[cfg.weight_sync_backend],
        timeout_s=cfg.weight_sync_timeout_seconds,
        has_checksum=cfg.weight_sync_check != "off",
        sends_changes=cfg.weight_sync_delta,
    )


def sync_tolerance(cfg: SkyRLConfig, device: torch.device, *, is_copied: bool) -> float | None:
    """Return the largest allowed difference between the log-probs of engine and policy; None if they are not compared.

    `is_copied` is False if the engine generates with the policy's own tensors. `device` is that of the policy.
    """
    check = cfg.generator.weight_sync_check
    if check in ("off", "checksum") or (check == "auto" and not is_copied):
        return None
    if cfg.generator.weight_sync_tolerance is not None:
        return cfg.generator.weight_sync_tolerance
    computes_in_bf16 = cfg.trainer.bf16 and device.type == "cuda"
    return BF16_TOLERANCE if computes_in_bf16 or cfg.trainer.policy.model.dtype != "float32" else FLOAT32_TOLERANCE


def _memory() -> tuple[int, int]:
    """Return free and total bytes of the device that generates."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()
    memory = psutil.virtual_memory()
    return memory.available, memory.total
