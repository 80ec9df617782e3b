"""vLLM engines of the tiny model."""

import copy
import gc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from train_kit.engines import EngineKit, SharedEngines
from train_kit.models import load_on_cpu
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.config.generator import Sampler
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.vllm.engine import AsyncVLLMEngine, VLLMEngine

NewEngine = Callable[..., VLLMEngine]
SaveModel = Callable[[PretrainedConfig], Path]
Start = Callable[[PretrainedConfig], tuple[VLLMEngine, EngineKit]]
OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 32,
    "max_num_batched_tokens": 1024,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "block_size": 32,
}


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

    def make(path: Path = tiny_model_path, sampler: Sampler = "seeded", **options: Any) -> VLLMEngine:
        engines.append(VLLMEngine({"model": str(path), **OPTIONS, **options}, tiny_tokenizer, sampler=sampler))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.close()


@pytest.fixture
def save_model(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> SaveModel:
    """Return a function that saves a model of a given configuration."""

    def save(config: PretrainedConfig) -> Path:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        tiny_tokenizer.save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.fixture
def start(new_engine: NewEngine, save_model: SaveModel, tiny_tokenizer: PreTrainedTokenizerBase) -> Start:
    """Return a function that starts an engine of a model of a configuration, with the kit of the same model."""

    def start(config: PretrainedConfig) -> tuple[VLLMEngine, EngineKit]:
        path = save_model(config)
        return new_engine(path), EngineKit(new_engine, load_on_cpu(path), tiny_tokenizer, 1e-4, 32)

    return start


@pytest.fixture(scope="session")
def vllm_options() -> dict[str, Any]:
    """Options of every engine of vLLM."""
    return OPTIONS


@pytest.fixture(scope="session")
def shared_engines(tiny_model: PreTrainedModel) -> Callable[[Callable[..., InferenceEngine]], SharedEngines]:
    """Share engines that a function starts."""
    return lambda start: SharedEngines(start, tiny_model, "gloo")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def async_engines(
    tiny_model_path: Path, shared_engines: Callable[..., SharedEngines], tiny_tokenizer: PreTrainedTokenizerBase
) -> AsyncIterator[SharedEngines]:
    """Engines of vLLM in processes of their own."""

    def start(**options: Any) -> AsyncVLLMEngine:
        return AsyncVLLMEngine({"model": str(tiny_model_path), **OPTIONS, **options}, tiny_tokenizer)

    engines = shared_engines(start)
    yield engines
    await engines.close()
