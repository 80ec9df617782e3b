"""vLLM's own sampler meets the engine contract, apart from seeds and from sampling that changes the distribution."""

import copy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from train_kit.engines import EngineKit, SharedEngines
from train_kit.own_logprobs_contract import OwnLogprobsContract
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.inference_engines.vllm.engine import AsyncVLLMEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def native_engines(
    tiny_model_path: Path,
    shared_engines: Callable[..., SharedEngines],
    tiny_tokenizer: PreTrainedTokenizerBase,
    vllm_options: dict[str, Any],
) -> AsyncIterator[SharedEngines]:
    """Engines in separate processes. On a CPU, vLLM never schedules asynchronously."""

    def start(**options: Any) -> AsyncVLLMEngine:
        return AsyncVLLMEngine({"model": str(tiny_model_path), **vllm_options, **options}, tiny_tokenizer, "native")

    engines = shared_engines(start)
    yield engines
    await engines.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine_kit(
    native_engines: SharedEngines, tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> AsyncIterator[EngineKit]:
    """Engines with vLLM's sampler."""
    model = copy.deepcopy(tiny_model)
    yield EngineKit(native_engines.new, model, tiny_tokenizer, 1e-4, 32, "gloo", temperature=0.0)
    await native_engines.reset()


class TestNativeContract(OwnLogprobsContract):
    """The engine contract, with greedy requests where it compares two responses."""

    backend = r"generator\.vllm\.sampler=native"

    async def test_sampled_tokens_depend_on_the_seed_alone(self, engine_kit: EngineKit) -> None:
        request = engine_kit.request(5, 20, temperature=1.0, ignore_eos=True)
        first, second = await engine_kit.new().generate([request, request])
        assert first.token_ids != second.token_ids  # vLLM ignores our seeds
