"""vLLM in a run: on this machine, or as a server."""

import math
import os
from typing import Any

import torch
from transformers import AutoConfig

from skyrl_train.inference_engines.base import EngineSetup, InferenceEngine
from skyrl_train.models.memory import config_cache_bytes_per_token


def start(setup: EngineSetup) -> InferenceEngine:
    """Create vLLM in this process if `setup.executor` is set, otherwise in separate processes."""
    cfg, generator, path = setup.cfg, setup.cfg.generator, setup.cfg.trainer.policy.model.path
    ready_timeout_s = math.ceil(generator.engine_start_timeout_seconds)
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(ready_timeout_s)  # vLLM reads it when it is imported
    from skyrl_train.inference_engines.vllm.engine import AsyncVLLMEngine, VLLMEngine

    has_gpu = torch.cuda.is_available()
    sampler = generator.choose_sampler(has_gpu=has_gpu)
    options: dict[str, Any] = {
        "model": path,
        "dtype": cfg.engine_dtype(has_gpu=has_gpu),
        "max_num_seqs": generator.max_num_seqs,
        "max_num_batched_tokens": generator.max_num_batched_tokens,
        "gpu_memory_utilization": setup.usable_bytes / setup.total_bytes,
        "enforce_eager": generator.enforce_eager,
        "enable_prefix_caching": generator.enable_prefix_caching,
        "enable_chunked_prefill": generator.enable_chunked_prefill,
    }
    if not has_gpu:  # on a CPU, vLLM allocates the whole cache up front
        config = AutoConfig.from_pretrained(path).get_text_config()
        bytes_per_token = config_cache_bytes_per_token(config, getattr(torch, options["dtype"]))
        max_bytes = generator.max_num_seqs * config.max_position_embeddings * bytes_per_token
        n_workers = generator.n_devices_per_engine
        options["kv_cache_memory_bytes"] = min(setup.usable_bytes, max_bytes) // n_workers
    options |= generator.engine_options
    if setup.executor is not None:
        return VLLMEngine(options, setup.tokenizer, setup.executor, sampler)
    for name in ("tensor", "pipeline", "data"):
        size = getattr(generator, f"inference_engine_{name}_parallel_size")
        if size > 1:
            options[f"{name}_parallel_size"] = size
    return AsyncVLLMEngine(options, setup.tokenizer, sampler)


def connect(url: str, setup: EngineSetup) -> InferenceEngine:
    """Connect to a running server."""
    from skyrl_train.inference_engines.vllm.server import VLLMServerEngine

    return VLLMServerEngine(url, setup.tokenizer, setup.cfg.generator.vllm.sampler)
