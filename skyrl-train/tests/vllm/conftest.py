"""vLLM engines of the tiny model."""

from __future__ import annotations

import copy
import gc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.inference_engines.vllm import VLLMEngine

pytest.register_assert_rewrite("tests.contract.engine_contract")

NewEngine = Callable[..., VLLMEngine]


@pytest.fixture(scope="session")
def tiny_head_dim() -> int:
    """The minimum head dimension of vLLM's attention on a CPU."""
    return 32


@pytest.fixture
def policy(tiny_model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the policy, whose weights a test may change."""
    return copy.deepcopy(tiny_model)


@pytest.fixture
async def new_engine(tiny_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[NewEngine]:
    """Create engines, one at a time, and close them after the test."""
    engines = []

    gc.freeze()  # vLLM runs the garbage collector repeatedly at start, which takes seconds for all imported objects

    def make(path: Path = tiny_model_path, **options: Any) -> VLLMEngine:
        defaults = {
            "dtype": "float32",
            "max_num_seqs": 32,
            "max_num_batched_tokens": 1024,
            "gpu_memory_utilization": 0.5,
            "enforce_eager": True,
            "max_cache_bytes": 1 << 26,
            "engine_init_kwargs": {"block_size": 32},
        }
        engines.append(VLLMEngine(str(path), tiny_tokenizer, **defaults | options))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.close()
