"""The inference engine of a run."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.client import EngineClient
from skyrl_train.inference_engines.hf import HFEngine
from skyrl_train.models.memory import config_cache_bytes_per_token
from skyrl_train.types.specs import SyncKind
from skyrl_train.weight_sync import SyncOptions
from skyrl_train.weight_sync.base import Transport

logger = logging.getLogger(__name__)

RECONNECT_INTERVAL_S = 2.0

FLOAT32_TOLERANCE, BF16_TOLERANCE = 1e-3, 0.1  # nats


def new_engine(
    cfg: SkyRLConfig,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    reserved_bytes: int,
    executor: ThreadPoolExecutor | None,
) -> InferenceEngine:
    """Create an engine for the policy `model` that computes in `executor`, which has one thread.

    Its cache may use the free memory of this machine, less `reserved_bytes` that the trainer will allocate. Only the
    embedded engine needs `model`. Without `executor`, the engine has this process to itself.
    """
    generator = cfg.generator
    if not generator.run_engines_locally:
        return _connect_servers(cfg, tokenizer)
    free, total = _memory()
    n_sharing = 1 if torch.cuda.is_available() else generator.num_inference_engines  # each GPU has one engine
    usable = int(max(free - reserved_bytes, 0) * generator.gpu_memory_utilization) // n_sharing
    if generator.backend == "vllm":
        return _new_vllm_engine(cfg, tokenizer, usable, total, executor)
    if generator.backend == "sglang":
        return _new_sglang_engine(cfg, tokenizer, usable / total)
    assert model is not None
    return HFEngine(
        model,
        tokenizer,
        max_num_seqs=generator.max_num_seqs,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        max_cache_bytes=usable,
        bf16=cfg.trainer.bf16,
        executor=executor,
        owns_model=executor is None,
    )


def needs_model(cfg: SkyRLConfig) -> bool:
    """Return True if the engine generates with a model of this process."""
    return cfg.generator.run_engines_locally and cfg.generator.backend in ("auto", "hf")


def sync_kind(cfg: SkyRLConfig) -> SyncKind:
    """Return the kind of weight sync: the embedded engine computes with the adapter itself, others merge it."""
    if not cfg.trainer.policy.model.lora.is_used:
        return "full"
    return "adapter" if needs_model(cfg) else "factors"


def _new_vllm_engine(
    cfg: SkyRLConfig,
    tokenizer: PreTrainedTokenizerBase,
    usable: int,
    total: int,
    executor: ThreadPoolExecutor | None,
) -> InferenceEngine:
    """Create vLLM in this process if it has a thread to share, else in separate processes."""
    ready_timeout_s = math.ceil(cfg.generator.engine_start_timeout_seconds)
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(ready_timeout_s)  # vLLM reads it when it is imported
    from skyrl_train.inference_engines.vllm.async_engine import AsyncVLLMEngine
    from skyrl_train.inference_engines.vllm.engine import VLLMEngine

    generator, path = cfg.generator, cfg.trainer.policy.model.path
    options: dict[str, Any] = {
        "model": path,
        "dtype": cfg.engine_dtype(has_gpu=torch.cuda.is_available()),
        "max_num_seqs": generator.max_num_seqs,
        "max_num_batched_tokens": generator.max_num_batched_tokens,
        "gpu_memory_utilization": usable / total,
        "enforce_eager": generator.enforce_eager,
        "enable_prefix_caching": generator.enable_prefix_caching,
        "enable_chunked_prefill": generator.enable_chunked_prefill,
    }
    if not torch.cuda.is_available():  # a CPU allocates the cache at once
        config = AutoConfig.from_pretrained(path).get_text_config()
        bytes_per_token = config_cache_bytes_per_token(config, getattr(torch, options["dtype"]))
        max_bytes = generator.max_num_seqs * config.max_position_embeddings * bytes_per_token
        options["kv_cache_memory_bytes"] = min(usable, max_bytes) // generator.n_devices_per_engine  # of each worker
    options |= _engine_init_kwargs(cfg)
    if executor is not None:
        return VLLMEngine(options, tokenizer, executor)
    for name in ("tensor", "pipeline", "data"):
        size = getattr(generator, f"inference_engine_{name}_parallel_size")
        if size > 1:
            options[f"{name}_parallel_size"] = size
    return AsyncVLLMEngine(options, tokenizer)


def _new_sglang_engine(cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, memory_share: float) -> InferenceEngine:
    """Start a server of SGLang on this machine, and connect to it."""
    from skyrl_train.inference_engines.sglang.engine import SGLangEngine
    from skyrl_train.inference_engines.sglang.launch import launch_server

    generator, path = cfg.generator, cfg.trainer.policy.model.path
    options = {
        "model_path": path,
        "dtype": cfg.engine_dtype(has_gpu=torch.cuda.is_available()),
        "tp_size": generator.inference_engine_tensor_parallel_size,
        "pp_size": generator.inference_engine_pipeline_parallel_size,
        "dp_size": generator.inference_engine_data_parallel_size,
        "mem_fraction_static": memory_share,
        "max_running_requests": generator.max_num_seqs,
        "chunked_prefill_size": generator.max_num_batched_tokens if generator.enable_chunked_prefill else -1,
        "disable_radix_cache": not generator.enable_prefix_caching,
        "disable_cuda_graph": generator.enforce_eager,
        **_engine_init_kwargs(cfg),
    }
    address, end_server = launch_server(options, generator.engine_start_timeout_seconds)
    try:
        return SGLangEngine(address, path, tokenizer, _weight_folder(cfg), end_server)
    except BaseException:
        end_server()
        raise


def _connect_servers(cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase) -> EngineClient:
    """Connect to the servers that other programs have started; wait for one that is started again."""
    urls, timeout_s = cfg.generator.remote_inference_engine_urls, cfg.generator.engine_start_timeout_seconds

    def connect(index: int) -> InferenceEngine:
        if cfg.generator.backend == "sglang":
            from skyrl_train.inference_engines.sglang.engine import SGLangEngine

            return SGLangEngine(urls[index], cfg.trainer.policy.model.path, tokenizer, _weight_folder(cfg))
        from skyrl_train.inference_engines.vllm.server import VLLMServerEngine

        return VLLMServerEngine(urls[index], tokenizer)

    async def reconnect(index: int) -> InferenceEngine:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return await asyncio.to_thread(connect, index)
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{error} (it was lost, and did not return in {timeout_s:g} s; raise "
                        "generator.engine_start_timeout_seconds if it needs more time)"
                    ) from error
            await asyncio.sleep(RECONNECT_INTERVAL_S)

    return EngineClient([connect(index) for index in range(len(urls))], reconnect)


def _engine_init_kwargs(cfg: SkyRLConfig) -> dict[str, Any]:
    """Return the options for the engine itself: `chat_template` is one of the tokenizer."""
    return {name: value for name, value in cfg.generator.engine_init_kwargs.items() if name != "chat_template"}


def _weight_folder(cfg: SkyRLConfig) -> Path:
    """Return the folder through which servers of SGLang get new weights."""
    return Path(cfg.trainer.run_dir) / "engine_weights"


def delete_weight_files(cfg: SkyRLConfig) -> None:
    """Delete weights that were left in this run folder because the run or an engine was killed during a weight sync."""
    shutil.rmtree(_weight_folder(cfg), ignore_errors=True)


def receiving_servers(cfg: GeneratorConfig) -> list[str]:
    """Return the addresses of the servers that receive weights themselves. Those of SGLang read files."""
    return cfg.remote_inference_engine_urls if cfg.backend == "vllm" and not cfg.run_engines_locally else []


def sync_options(cfg: GeneratorConfig) -> SyncOptions:
    """Return the settings of weight syncs to other processes."""
    transport: Transport = "shared_memory" if cfg.weight_sync_backend == "shm" else cfg.weight_sync_backend
    if cfg.backend == "sglang" and transport in ("nccl", "cuda_ipc"):
        logger.info(
            "generator.weight_sync_backend=%s has no effect with generator.backend=sglang: it reads weights from files",
            transport,
        )
        transport = "auto"
    return SyncOptions(
        transport,
        prefers_gpus=cfg.run_engines_locally and cfg.backend != "sglang" and not cfg.weight_sync_delta,
        ipc_bytes=int(cfg.weight_transfer_threshold_cuda_ipc_GB * 1e9),
        timeout_s=cfg.weight_sync_timeout_seconds,
        has_checksum=cfg.weight_sync_check != "off",
        sends_changes=cfg.weight_sync_delta,
    )


def sync_tolerance(
    cfg: SkyRLConfig, device: torch.device, engine_dtype: torch.dtype | None, *, is_copied: bool
) -> float | None:
    """Return the largest allowed difference between the log-probs of engine and policy; None if they are not compared.

    `is_copied` is False if the engine generates with the policy's own tensors. `device` is that of the policy, and
    `engine_dtype` that of the engine's weights, if it is known.
    """
    check = cfg.generator.weight_sync_check
    if check in ("off", "checksum") or (check == "auto" and not is_copied):
        return None
    if cfg.generator.weight_sync_tolerance is not None:
        return cfg.generator.weight_sync_tolerance
    computes_in_bf16 = cfg.trainer.bf16 and device.type == "cuda"
    dtypes = {getattr(torch, cfg.trainer.policy.model.dtype), engine_dtype or torch.float32}
    return BF16_TOLERANCE if computes_in_bf16 or dtypes != {torch.float32} else FLOAT32_TOLERANCE


def _memory() -> tuple[int, int]:
    """Return free and total bytes of the device that generates."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()
    memory = psutil.virtual_memory()
    return memory.available, memory.total
