"""SGLang in a run: a server that the run starts on this machine, or a running one."""

from __future__ import annotations

import torch

from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.setup import EngineSetup
from skyrl_train.inference_engines.sglang.engine import SGLangEngine
from skyrl_train.inference_engines.sglang.launch import launch_server


def start(setup: EngineSetup) -> InferenceEngine:
    """Start a server on this machine, and connect to it."""
    generator, path = setup.cfg.generator, setup.cfg.trainer.policy.model.path
    options = {
        "model_path": path,
        "dtype": setup.cfg.engine_dtype(has_gpu=torch.cuda.is_available()),
        "tp_size": generator.inference_engine_tensor_parallel_size,
        "pp_size": generator.inference_engine_pipeline_parallel_size,
        "dp_size": generator.inference_engine_data_parallel_size,
        "mem_fraction_static": setup.usable_bytes / setup.total_bytes,
        "max_running_requests": generator.max_num_seqs,
        "chunked_prefill_size": generator.max_num_batched_tokens if generator.enable_chunked_prefill else -1,
        "disable_radix_cache": not generator.enable_prefix_caching,
        "disable_cuda_graph": generator.enforce_eager,
        **setup.options,
    }
    address, end_server = launch_server(options, generator.engine_start_timeout_seconds)
    try:
        return SGLangEngine(address, path, setup.tokenizer, setup.weight_folder, end_server)
    except BaseException:
        end_server()
        raise


def connect(url: str, setup: EngineSetup) -> InferenceEngine:
    """Connect to a running server."""
    return SGLangEngine(url, setup.cfg.trainer.policy.model.path, setup.tokenizer, setup.weight_folder)
