"""Servers of SGLang on a CPU."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from train_kit.sglang_cpu import COMMAND, OPTIONS, START_TIMEOUT_S, StartServer

from skyrl_train.inference_engines.sglang.engine import launch_server


@pytest.fixture(scope="session")
def tiny_head_dim() -> int:
    """A head dimension that SGLang's attention accepts."""
    return 32


@pytest.fixture(scope="session")
def start_server(tiny_model_path: Path) -> Iterator[StartServer]:
    """Start servers of the tiny model, one for each set of options; return their addresses."""
    servers: dict[tuple[int, int], tuple[str, Callable[[], None]]] = {}

    def start(max_num_seqs: int = 64, max_num_batched_tokens: int = 1024) -> str:
        key = (max_num_seqs, max_num_batched_tokens)
        if key not in servers:
            limits = {"max_running_requests": max_num_seqs, "chunked_prefill_size": max_num_batched_tokens}
            options = {"model_path": tiny_model_path, **OPTIONS, **limits}
            servers[key] = launch_server(options, START_TIMEOUT_S, COMMAND)
        return servers[key][0]

    yield start
    for _, end in servers.values():
        end()
