"""The vLLM engine meets the engine contract."""

from collections.abc import Callable

import pytest
from train_kit.engine_contract import InProcessContract
from train_kit.engines import EngineKit
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.inference_engines.vllm.engine import VLLMEngine


@pytest.fixture
def engine_kit(
    new_engine: Callable[..., VLLMEngine], policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> EngineKit:
    """An engine with its own copy of the weights."""
    return EngineKit(new_engine, policy, tiny_tokenizer, tolerance=1e-4, cache_block_size=32)


class TestVLLMContract(InProcessContract):
    """The engine contract, and threads of this process."""
