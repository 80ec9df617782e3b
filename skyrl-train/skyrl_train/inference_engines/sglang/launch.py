"""SGLang in a run: a server that the run starts on this machine, or a running server."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineSetup, InferenceEngine, weight_folder
from skyrl_train.inference_engines.http import call_server
from skyrl_train.inference_engines.sglang.engine import SGLangEngine
from skyrl_train.weight_sync.sync import free_port

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 20.0
POLL_S = 0.5
OWN_OPTIONS = {"host": "127.0.0.1", "skip_tokenizer_init": True, "enable_memory_saver": True}


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
        **generator.engine_options,
    }
    address, end_server = launch_server(options, generator.engine_start_timeout_seconds)
    try:
        return SGLangEngine(address, path, setup.tokenizer, weight_folder(setup.cfg), end_server)
    except BaseException:
        end_server()
        raise


def connect(url: str, setup: EngineSetup) -> InferenceEngine:
    """Connect to a running server."""
    return SGLangEngine(url, setup.cfg.trainer.policy.model.path, setup.tokenizer, weight_folder(setup.cfg))


def launch_server(
    options: Mapping[str, Any],
    start_timeout_s: float,
    command: tuple[str, ...] = (sys.executable, "-m", "sglang.launch_server"),
) -> tuple[str, Callable[[], None]]:
    """Start a server on this machine and wait until it is healthy. Blocks.

    `options` are fields of SGLang's `ServerArgs`, such as `model_path`.

    Returns:
        The server's address, and a function that ends the server.

    Raises:
        EngineError: the server ended or was not healthy in time, or `options` has an option that we set ourselves.
    """
    if clashes := sorted((OWN_OPTIONS.keys() | {"port"}) & options.keys()):
        raise EngineError(f"engine_init_kwargs.{clashes[0]} is set by the engine itself; remove it")
    address = f"127.0.0.1:{free_port()}"
    arguments = list_arguments({**OWN_OPTIONS, "port": int(address.rpartition(":")[2]), **options})
    process = subprocess.Popen([*command, *arguments], start_new_session=True)  # so `end` can also kill its workers

    def end() -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT_S)
                return

    deadline = time.monotonic() + start_timeout_s
    try:
        while True:
            if process.poll() is not None:
                raise EngineError(
                    f"SGLang ended with exit status {process.returncode} before it was ready, started with "
                    f"{' '.join(arguments)}; see its output above"
                )
            with suppress(EngineError):
                call_server(f"http://{address}", "GET", "/health")
                return address, end
            if time.monotonic() > deadline:
                raise EngineError(
                    f"SGLang was not ready in {start_timeout_s:g} s; see its output above. If it is still "
                    "loading, raise generator.engine_start_timeout_seconds"
                )
            time.sleep(POLL_S)
    except BaseException:
        end()
        raise


def list_arguments(options: Mapping[str, Any]) -> list[str]:
    """Convert options to command-line arguments. None and False are left out.

    `{"tp_size": 2, "trust_remote_code": True}` becomes `--tp-size 2 --trust-remote-code`.
    """
    arguments = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{name.replace('_', '-')}")
        if value is not True:
            arguments += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return arguments
