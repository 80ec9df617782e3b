"""vLLM's own sampler meets the engine contract, apart from seeds and from sampling that changes the distribution."""

import copy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from train_kit.engines import EngineKit, SharedEngines, assert_agrees
from train_kit.own_logprobs_contract import OwnLogprobsContract
from train_kit.runs import read_lines
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.entrypoints import main_base
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.vllm.async_engine import AsyncVLLMEngine
from skyrl_train.inference_engines.vllm.engine import VLLMEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def native_engines(
    tiny_model_path: Path,
    shared_engines: Callable[..., SharedEngines],
    tiny_tokenizer: PreTrainedTokenizerBase,
    vllm_options: dict[str, Any],
) -> AsyncIterator[SharedEngines]:
    """Engines in separate processes that schedule asynchronously."""

    def start(**options: Any) -> AsyncVLLMEngine:
        given = {"model": str(tiny_model_path), **vllm_options, "async_scheduling": True, **options}
        return AsyncVLLMEngine(given, tiny_tokenizer, "native")

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


async def test_scheduling_is_asynchronous(engine_kit: EngineKit, native_engines: SharedEngines) -> None:
    engine = engine_kit.new()
    assert isinstance(engine, AsyncVLLMEngine)
    assert engine._client.vllm_config.scheduler_config.async_scheduling


async def test_log_probs_equal_those_of_the_policy_when_drafts_are_accepted(
    tiny_model_path: Path,
    tiny_model: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    vllm_options: dict[str, Any],
) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    engine = AsyncVLLMEngine(
        {"model": str(tiny_model_path), **vllm_options, "speculative_config": drafts}, tiny_tokenizer, "native"
    )
    try:
        kit = EngineKit(lambda: engine, tiny_model, tiny_tokenizer, 1e-4, 32)
        for temperature in (0.0, 0.7, 1.0):
            request = kit.request(40, 60, temperature=temperature, ignore_eos=True)
            (result,) = await engine.generate([request])
            assert_agrees(kit, request, result)
    finally:
        await engine.close()


async def test_the_engine_in_this_process_samples_natively(
    new_engine: Callable[..., VLLMEngine], engine_kit: EngineKit
) -> None:
    engine = new_engine(sampler="native")
    sampled = engine_kit.request(30, 20, temperature=0.7, n_top_logprobs=2, ignore_eos=True)
    plain = engine_kit.request(40, 20, temperature=1.3, ignore_eos=True)
    for request, result in zip([sampled, plain], await engine.generate([sampled, plain]), strict=True):
        assert_agrees(engine_kit, request, result)
        assert [len(top) for top in result.top_logprobs or ()] == ([2] * 20 if request is sampled else [])
    with pytest.raises(EngineError, match=r"top_p=0\.5: generator\.vllm\.sampler=native does not report"):
        await engine.generate([engine_kit.request(5, top_p=0.5)])


def test_a_run_trains_with_the_native_sampler(catch_run: list[str], tmp_path: Path) -> None:
    main_base.main([*catch_run, "generator.backend=vllm", "generator.vllm.sampler=native"])
    rows = read_lines(tmp_path / "skyrl/test_run/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
        assert row["sync/logprob_gap"] < 1e-4
