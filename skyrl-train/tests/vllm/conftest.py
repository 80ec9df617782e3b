"""A tiny model that vLLM's CPU attention takes, and engines of it."""

from __future__ import annotations

import copy
import gc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3ForCausalLM

from examples.catch.catch_dataset import CatchDataset
from examples.catch.players import conversation, random_player
from skyrl_train.inference_engines.vllm import VLLMEngine
from skyrl_train.models.loading import load_model, load_tokenizer
from skyrl_train.models.tiny import tiny_qwen3, train_tokenizer

pytest.register_assert_rewrite("tests.contract.engine_contract")

NewEngine = Callable[..., VLLMEngine]


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a two-layer Qwen3, whose heads have 32 dimensions, and its tokenizer."""
    player = random_player(seed=0)
    tokenizer = train_tokenizer(conversation(row, player) for row in CatchDataset(train_size=50).train_rows())
    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer.save_pretrained(folder)
    config = tiny_qwen3(tokenizer, seed=0).config
    config.head_dim = 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `tiny_model_path`."""
    return load_tokenizer(str(tiny_model_path))


@pytest.fixture(scope="session")
def tiny_model(tiny_model_path: Path) -> PreTrainedModel:
    """The model of `tiny_model_path`, shared by all tests: copy it before you change its weights."""
    return load_model(str(tiny_model_path), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def policy(tiny_model: PreTrainedModel) -> PreTrainedModel:
    """A policy of the test's own, whose weights `new_engine` syncs."""
    return copy.deepcopy(tiny_model)


@pytest.fixture
async def new_engine(
    tiny_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel
) -> AsyncIterator[NewEngine]:
    """Makes engines, one at a time, and closes them after the test."""
    engines = []

    gc.freeze()  # while it starts, vLLM collects garbage again and again: seconds a test in all that is imported here

    def make(path: Path = tiny_model_path, **options: Any) -> VLLMEngine:
        defaults = {
            "weights": policy.named_parameters,
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
