"""The embedded engine meets the engine contract."""

import copy
from collections.abc import AsyncIterator

import pytest
from train_kit.engine_contract import InProcessContract, ShortageContract
from train_kit.engines import EngineKit, embedded_kit
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.inference_engines.hf import PackedEngine


@pytest.fixture
async def engine_kit(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[EngineKit]:
    """An engine that generates with the tensors of the policy itself."""
    async with embedded_kit(PackedEngine, copy.deepcopy(tiny_model), tiny_tokenizer) as kit:
        yield kit


class TestHFContract(InProcessContract, ShortageContract):
    """The engine contract, and threads of the embedded engine."""
