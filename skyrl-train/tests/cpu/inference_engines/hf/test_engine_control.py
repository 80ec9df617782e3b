"""Aborting, pausing, new weights in the middle, streaming, and prompts that others have read."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable

import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, SamplingParams
from skyrl_train.inference_engines.hf import HFEngine
from skyrl_train.models.logprobs import response_logprobs

NewEngine = Callable[..., HFEngine]
Passes = list[int]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


def request(n_prompt: int, n_new: int, session: str | None = None, token: int = 5) -> EngineRequest:
    return EngineRequest([token] * n_prompt, SamplingParams(max_new_tokens=n_new), token, session)


def assert_same(actual: EngineResult, expected: EngineResult) -> None:
    assert actual.token_ids == expected.token_ids
    assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


async def test_an_aborted_session_returns_what_it_has(
    new_engine: NewEngine, forward_passes: Passes, eventually: Eventually
) -> None:
    engine = new_engine()
    kept, aborted = request(10, 30), request(11, 400, session="game")
    expected = await engine.generate([kept, request(11, 30)])
    forward_passes.clear()
    calls = [asyncio.create_task(engine.generate([r])) for r in (kept, aborted)]
    await eventually(lambda: len(forward_passes) > 5)
    engine.abort("game")
    engine.abort("another")
    results = [result for call in calls for result in await call]
    assert_same(results[0], expected[0])
    assert results[1].stop_reason == "abort"
    n_tokens = len(results[1].token_ids)
    assert 3 < n_tokens < 30
    assert results[1].token_ids == expected[1].token_ids[:n_tokens]
    assert results[1].logprobs is not None
    assert len(results[1].logprobs) == n_tokens


async def test_abort_without_a_session_ends_everything_also_what_waits_or_is_paused(
    new_engine: NewEngine, forward_passes: Passes, eventually: Eventually
) -> None:
    engine = new_engine(max_num_seqs=1)
    calls = [asyncio.create_task(engine.generate([request(n, 400)])) for n in (10, 11)]
    await eventually(lambda: len(forward_passes) > 5)
    await engine.pause()
    engine.abort()
    running, waiting = [(await call)[0] for call in calls]
    assert running.stop_reason == waiting.stop_reason == "abort"
    assert len(running.token_ids) > 3
    assert waiting.token_ids == []
    engine.resume()
    assert len((await engine.generate([request(10, 4)]))[0].token_ids) == 4


async def test_a_paused_engine_keeps_what_it_has_and_goes_on(
    new_engine: NewEngine, forward_passes: Passes, eventually: Eventually
) -> None:
    engine = new_engine()
    (expected,) = await engine.generate([request(10, 40)])
    forward_passes.clear()
    call = asyncio.create_task(engine.generate([request(10, 40)]))
    await eventually(lambda: len(forward_passes) > 5)
    await engine.pause()
    with pytest.raises(EngineError, match="paused already"):
        await engine.pause()
    n_passes = len(forward_passes)
    late = asyncio.create_task(engine.generate([request(12, 4)]))
    await asyncio.sleep(0.05)
    assert len(forward_passes) == n_passes
    assert not call.done()
    engine.resume()
    assert_same((await call)[0], expected)
    assert len((await late)[0].token_ids) == 4
    assert sum(forward_passes) < 10 + 40 + 12 + 4  # nothing was read twice
    with pytest.raises(EngineError, match="not paused"):
        engine.resume()


async def test_new_weights_in_the_middle_of_a_response(
    new_engine: NewEngine, tiny_model: PreTrainedModel, eventually: Eventually
) -> None:
    model = copy.deepcopy(tiny_model)
    engine = new_engine(model)
    told: list[int] = []
    call = asyncio.create_task(
        engine.generate([request(10, 40)], on_tokens=lambda index, token_ids, logprobs: told.extend(token_ids))
    )
    await eventually(lambda: len(told) > 5)
    await engine.pause()
    n_before = len(told)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1).add_(0.01)
    await engine.sync_weights(3)
    engine.resume()
    (result,) = await call
    assert told == result.token_ids
    assert result.weight_spans == ((0, n_before), (3, 40 - n_before))
    sequences = torch.tensor([[5] * 10 + result.token_ids])
    scores = [
        response_logprobs(m, sequences, torch.ones_like(sequences), torch.ones(1, 40), 1.0)[0][0].tolist()
        for m in (tiny_model, model)
    ]
    assert result.logprobs == pytest.approx(scores[0][:n_before] + scores[1][n_before:], abs=1e-5)


async def test_tokens_are_told_as_they_are_sampled(new_engine: NewEngine) -> None:
    requests = [request(10, 6), request(12, 9)]
    told: list[tuple[int, list[int], list[float]]] = []
    results = await new_engine().generate(requests, on_tokens=lambda *news: told.append(news))
    assert [len(token_ids) for _, token_ids, _ in told] == [1] * 15
    for index, result in enumerate(results):
        assert [token for i, token_ids, _ in told if i == index for token in token_ids] == result.token_ids
        assert [value for i, _, values in told if i == index for value in values] == result.logprobs


async def test_a_longer_prompt_without_a_session_reads_what_is_new(
    new_engine: NewEngine, forward_passes: Passes
) -> None:
    engine = new_engine()
    (first,) = await engine.generate([request(100, 30)])
    prompt_ids = [5] * 100 + first.token_ids + [8] * 20
    (expected,) = await new_engine().generate([EngineRequest(prompt_ids, SamplingParams(8), 1)])
    forward_passes.clear()
    (second,) = await engine.generate([EngineRequest(prompt_ids, SamplingParams(8), 1)])
    assert forward_passes[0] == 21  # the last token of the first response was never read
    assert_same(second, expected)
    assert second.n_cached == 129


async def test_a_late_sample_of_a_group_does_not_read_its_prompt(
    new_engine: NewEngine, forward_passes: Passes, eventually: Eventually
) -> None:
    engine = new_engine()
    late = EngineRequest([5] * 100, SamplingParams(max_new_tokens=8), seed=77)
    (expected,) = await new_engine().generate([late])
    forward_passes.clear()
    first = asyncio.create_task(engine.generate([request(100, 40)]))
    await eventually(lambda: len(forward_passes) > 3)
    (result,) = await engine.generate([late])
    assert_same(result, expected)
    await first
    assert max(forward_passes[1:]) == 2


async def test_an_engine_asleep_holds_no_memory_and_wakes_up(new_engine: NewEngine) -> None:
    engine = new_engine()
    (expected,) = await engine.generate([request(10, 8, session="s")])
    await engine.sleep()
    assert not engine._memory._layers
    await engine.wake_up()
    assert_same((await engine.generate([request(10, 8, session="s")]))[0], expected)
    call = asyncio.create_task(engine.generate([request(10, 8)]))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="cannot sleep while 1 sequences"):
        await engine.sleep()
    await call


async def test_a_short_response_does_not_end_before_its_least_length(
    new_engine: NewEngine, tiny_model: PreTrainedModel
) -> None:
    eos = SamplingParams(max_new_tokens=40, temperature=3.0)
    (free,) = await new_engine().generate([EngineRequest([5] * 9, eos, seed=3, session_id=None)])
    sampling = SamplingParams(max_new_tokens=40, min_new_tokens=40, temperature=3.0, stop=tuple("abcdefgh"))
    (forced,) = await new_engine().generate([EngineRequest([5] * 9, sampling, seed=3)])
    assert len(forced.token_ids) == 40
    assert forced.stop_reason == "length" or forced.token_ids[-1] != 2
    assert 2 not in forced.token_ids
    assert free.sampling_logprobs is None
    assert forced.sampling_logprobs is not None
    assert len(forced.sampling_logprobs) == 40
