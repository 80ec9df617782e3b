"""The vLLM engine meets the engine contract."""

import threading
from collections.abc import Callable

import pytest
from train_kit.engine_contract import EngineContract
from train_kit.engines import EngineKit
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.inference_engines.vllm.engine import VLLMEngine


@pytest.fixture
def engine_kit(
    new_engine: Callable[..., VLLMEngine], policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> EngineKit:
    """An engine with its own copy of the weights."""
    return EngineKit(new_engine, policy, tiny_tokenizer, tolerance=1e-4, cache_block_size=32)


class TestVLLMContract(EngineContract):
    """The engine contract, and threads of this process."""

    async def test_close_during_a_step_leaves_no_thread(self, engine_kit: EngineKit) -> None:
        threads = set(threading.enumerate())
        await self.test_close_fails_all_waiting_calls(engine_kit)
        assert set(threading.enumerate()) <= threads
