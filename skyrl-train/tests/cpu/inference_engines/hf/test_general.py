"""The general engine meets the contract, apart from caches of sessions."""

import copy
from collections.abc import AsyncIterator

import pytest
from train_kit.engine_contract import CallContract, ControlContract, EndingContract, SamplingContract, WeightContract
from train_kit.engines import LIMITS, EngineKit
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.inference_engines.hf import GeneralEngine


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
