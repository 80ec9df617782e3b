"""The vLLM engine beyond the engine contract: failures in vLLM, low memory, equal tokens to the embedded engine."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from train_kit.engines import EngineKit, Listener, assert_agrees
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.hf import PackedEngine
from skyrl_train.inference_engines.vllm.engine import VLLMEngine
from skyrl_train.inference_engines.vllm.sampler import PositionSampler

NewEngine = Callable[..., VLLMEngine]
BYTES_OF_A_CONTEXT = 512 * 2 * 2 * 2 * 32 * 4  # tokens, keys and values, layers, heads, head_dim, float32


@pytest.fixture
def kit(new_engine: NewEngine, policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> EngineKit:
    """Requests and expected results for the vLLM engine."""
    return EngineKit(new_engine, policy, tiny_tokenizer, tolerance=1e-4, cache_block_size=32)


def model_of(engine: VLLMEngine) -> torch.nn.Module:
    """Return the model of vLLM."""
    worker = engine._client.engine_core.model_executor.driver_worker.worker
    model: torch.nn.Module = worker.model_runner.get_model()
    return model


async def test_both_engines_sample_the_same_tokens(kit: EngineKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_train.inference_engines.sampling.CHUNK_LOGITS", 2 * len(kit.tokenizer))
    shapes: list[dict[str, Any]] = [{}, {"temperature": 0.6, "top_p": 0.8}, {"top_k": 9, "frequency_penalty": 0.4}]
    requests = [kit.request(10 + 30 * i, 40, seed=i, **shapes[i % 3]) for i in range(9)]
    embedded = PackedEngine(
        kit.model, kit.tokenizer, max_num_seqs=32, max_num_batched_tokens=1024, max_cache_bytes=1 << 28
    )
    expected = await embedded.generate(requests)
    await embedded.close()
    results = await kit.new().generate(requests)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    for result, other in zip(results, expected, strict=True):
        assert result.sampling_logprobs == pytest.approx(other.sampling_logprobs, abs=1e-4)


async def test_vllms_own_sampler_reports_the_log_probs_of_the_policy(kit: EngineKit) -> None:
    engine = kit.new(sampler="native")
    with_top = kit.request(30, 20, temperature=0.7, n_top_logprobs=2, ignore_eos=True)
    plain = kit.request(40, 20, temperature=1.3, ignore_eos=True)
    for request, result in zip([with_top, plain], await engine.generate([with_top, plain]), strict=True):
        assert_agrees(kit, request, result)
        assert [len(top) for top in result.top_logprobs or ()] == ([2] * 20 if request is with_top else [])
    for name, value in (("top_p", 0.5), ("temperature", 2.5), ("temperature", 0.005)):
        with pytest.raises(EngineError, match=rf"{name}={value}: generator\.vllm\.sampler=native"):
            await engine.generate([kit.request(5, **{name: value})])


@pytest.mark.parametrize("place", ["model", "sampler"])
async def test_a_failing_step_fails_every_caller_and_the_engine_recovers(
    kit: EngineKit, place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = kit.new(max_num_seqs=2)
    requests = [kit.request(70, 8, seed=seed, ignore_eos=True) for seed in range(3)]
    expected = await engine.generate(requests)
    await kit.sync(engine, 0)  # clears the cache, so prompts are read again
    target, method = (model_of(engine), "forward") if place == "model" else (PositionSampler, "_draw")
    works, n_calls = getattr(target, method), 0

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls > 5:
            raise ValueError("out of luck")
        return works(*args, **options)

    with monkeypatch.context() as patches:
        patches.setattr(target, method, fail)
        outcomes = await asyncio.gather(*(engine.generate([r]) for r in requests), return_exceptions=True)
    assert {str(outcome) for outcome in outcomes} == {"generation failed: ValueError('out of luck')"}
    assert {type(outcome) for outcome in outcomes} == {EngineError}
    assert "ValueError: out of luck" in caplog.text  # with traceback
    results = await engine.generate(requests)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert [r.n_reused for r in results] == [0, 0, 0]  # blocks of the failing step are not reused


async def test_preempted_requests_read_their_tokens_again(kit: EngineKit) -> None:
    requests = [kit.request(100, 300, seed=seed, ignore_eos=True) for seed in range(3)]
    engine = kit.new(kv_cache_memory_bytes=BYTES_OF_A_CONTEXT * 5 // 4)
    n_read = 0

    def count(_: torch.nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        nonlocal n_read
        n_read += inputs["input_ids"].numel()

    model_of(engine).register_forward_pre_hook(count, with_kwargs=True)
    for request, result in zip(requests, await engine.generate(requests), strict=True):
        assert_agrees(kit, request, result)
        assert (len(result.token_ids), result.stop_reason, result.n_reused) == (300, "length", 0)
    assert n_read > 3 * (100 + 299)


@pytest.mark.parametrize("how", ["cancelled", "aborted", "aborted while paused", "stop string"])
async def test_vllm_drops_finished_requests(kit: EngineKit, how: str) -> None:
    engine = kit.new()
    scheduler = engine._client.engine_core.scheduler
    options = {"stop": tuple("aeiou \n")} if how == "stop string" else {}
    listener = Listener(engine, kit.request(10, 400, ignore_eos=True, **options))
    await listener.wait_for(1)
    if how == "cancelled":
        listener.task.cancel()
    elif how == "aborted":
        await engine.abort()
    elif how == "aborted while paused":
        await engine.pause()
        await engine.abort()
        await kit.sync(engine, 1)
        assert not scheduler.has_unfinished_requests()
        await engine.resume()
    await asyncio.wait([listener.task])
    assert listener.task.cancelled() or len(listener.task.result().token_ids) < 400
    assert len((await engine.generate([kit.request(10, 2, ignore_eos=True)]))[0].token_ids) == 2
    assert not scheduler.has_unfinished_requests()
