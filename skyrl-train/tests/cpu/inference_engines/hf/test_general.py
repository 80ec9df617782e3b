"""The general engine meets the contract, apart from caches of sessions."""

import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest
from train_kit.architectures import tiny_config
from train_kit.engine_contract import CallContract, ControlContract, EndingContract, SamplingContract, WeightContract
from train_kit.engines import LIMITS, EngineKit
from train_kit.models import create_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.inference_engines.hf import GeneralEngine, create_engine
from skyrl_train.inference_engines.hf.embedded import EmbeddedEngine


@pytest.fixture
async def engine_kit(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[EngineKit]:
    model, engines = copy.deepcopy(tiny_model), []

    def new(**options: int) -> GeneralEngine:
        engines.append(GeneralEngine(model, tiny_tokenizer, **LIMITS | options))
        return engines[-1]

    yield EngineKit(new, model, tiny_tokenizer, tolerance=1e-5, cache_block_size=1)
    for engine in engines:
        await engine.close()


class TestGeneralContract(SamplingContract, CallContract, EndingContract, WeightContract, ControlContract):
    pass


@pytest.fixture
async def hybrid_kit(tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[EngineKit]:
    """An engine of a Qwen3.5, which has three recurrent layers and one with attention."""
    tokens = {"eos_token_id": tiny_tokenizer.eos_token_id, "pad_token_id": tiny_tokenizer.pad_token_id}
    model, engines = create_model(tiny_config("qwen3_5_text", **tokens)).eval(), []

    def new(**options: int) -> EmbeddedEngine[Any]:
        engines.append(create_engine(model, tiny_tokenizer, **LIMITS | options))
        assert isinstance(engines[-1], GeneralEngine)
        return engines[-1]

    yield EngineKit(new, model, tiny_tokenizer, tolerance=1e-4, cache_block_size=1)
    for engine in engines:
        await engine.close()


class TestHybridContract(SamplingContract, WeightContract, ControlContract):
    @pytest.fixture
    def engine_kit(self, hybrid_kit: EngineKit) -> EngineKit:
        return hybrid_kit
