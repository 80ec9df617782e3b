import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from train_kit.engines import assert_same, greedy, trainer_logprobs
from train_kit.weight_sync import sync_weights
from transformers import PreTrainedModel

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, SamplingParams
from skyrl_train.inference_engines.hf import PackedEngine, attention
from skyrl_train.models.memory import cache_bytes_per_token

NewEngine = Callable[..., PackedEngine]
Passes = list[int]


def prompt(length: int, seed: int = 0, vocab_size: int = 61) -> list[int]:
    """Return random tokens without special ones."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def request(
    prompt_ids: list[int], n_new: int = 8, seed: int = 0, session: str | None = None, **sampling: Any
) -> EngineRequest:
    return EngineRequest(prompt_ids, SamplingParams(max_new_tokens=n_new, **sampling), seed, session)


def ragged_requests(n: int = 6) -> list[EngineRequest]:
    """Return requests with different prompts, lengths, temperatures and seeds. Two of them share a prompt."""
    requests = [
        request(prompt(3 + 7 * i, seed=i), n_new=4 + 3 * i, seed=i, temperature=0.5 + 0.25 * i) for i in range(n)
    ]
    return [*requests, replace(requests[2], seed=99)]


def assert_agrees(model: PreTrainedModel, request: EngineRequest, result: EngineResult) -> None:
    """Assert that the log-probs equal the trainer's."""
    assert result.logprobs == pytest.approx(trainer_logprobs(model, request, result), abs=1e-5)


def assert_all_same(actual: Sequence[EngineResult], expected: Sequence[EngineResult]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other, 5e-6)


async def serve_separately(new_engine: NewEngine, requests: list[EngineRequest]) -> list[EngineResult]:
    """Serve each request in a new engine, without a session."""
    return [(await new_engine().generate([replace(r, session_id=None)]))[0] for r in requests]


# -- against the model


# 500: a mask for every two queries
@pytest.mark.parametrize("mask_size", [500, pytest.param(attention.MASK_SIZE, marks=pytest.mark.nightly)])
async def test_other_architectures_agree_with_transformers(
    new_engine: NewEngine, other_model: PreTrainedModel, mask_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MASK_SIZE", mask_size)
    engine = new_engine(other_model)
    lengths = (1, 9, 60, 90)  # a sliding window ends at 64
    requests = [request(prompt(n), n_new=12, temperature=0.0, session=str(n)) for n in lengths]
    first = await engine.generate(requests)
    assert [r.token_ids for r in first] == [greedy(other_model, r.prompt_ids, 12, eos_id=2) for r in requests]
    longer = [
        request(r.prompt_ids + result.token_ids + prompt(4), temperature=0.7, session=r.session_id)
        for r, result in zip(requests, first, strict=True)
    ]
    for turn, result in zip(longer, await engine.generate(longer), strict=True):
        assert_agrees(other_model, turn, result)


# -- independence


async def test_results_do_not_depend_on_the_batch(new_engine: NewEngine, forward_passes: Passes) -> None:
    requests = ragged_requests()
    expected = await serve_separately(new_engine, requests)
    batched = await new_engine().generate(requests)
    backwards = await new_engine().generate(requests[::-1])
    one_at_a_time = await new_engine(max_num_seqs=1).generate(requests)
    forward_passes.clear()
    two_at_a_time = await new_engine(max_num_seqs=2).generate(requests)
    assert 2 in forward_passes
    for results in (batched, backwards[::-1], one_at_a_time, two_at_a_time):
        assert_all_same(results, expected)
    assert len({tuple(result.token_ids) for result in expected}) == len(requests)


async def test_results_do_not_depend_on_the_time_of_arrival(
    new_engine: NewEngine, forward_passes: Passes, eventually: Callable[[Callable[[], bool]], Awaitable[None]]
) -> None:
    requests = ragged_requests()
    expected = await serve_separately(new_engine, requests)
    forward_passes.clear()
    engine = new_engine()
    calls = []
    for n_calls, r in enumerate(requests):
        await eventually(lambda n=n_calls: len(forward_passes) >= 2 * n)
        calls.append(asyncio.create_task(engine.generate([r])))
    assert_all_same([(await call)[0] for call in calls], expected)
    assert {2, 3} <= set(forward_passes)  # the requests did share passes


# -- weights


async def test_a_failed_sync_clears_the_cache_and_keeps_the_old_weights(
    new_engine: NewEngine, tiny_model: PreTrainedModel
) -> None:
    engine, turn = new_engine(copy.deepcopy(tiny_model)), request(prompt(80), session="game")
    await engine.generate([turn])
    (first, tensor), (second, _), *_ = tiny_model.named_parameters()
    for sent, message in (
        ([(first, tensor), (second, tensor)], rf"the policy sends {second} of shape .* but the engine's model has"),
        ([("unknown", tensor)], "the policy sends unknown of shape .* but the engine's model has none"),
        ([(first, tensor)], "the policy has no "),
    ):
        with pytest.raises(EngineError, match=message):
            await sync_weights(engine, lambda sent=sent: sent, 1)
        (result,) = await engine.generate([turn])
        assert (result.n_reused, {span.version for span in result.weight_spans}) == (0, {0})


# -- tokens read


async def test_the_next_turn_of_a_session_reads_only_new_tokens(
    new_engine: NewEngine, tiny_model: PreTrainedModel, forward_passes: Passes
) -> None:
    engine = new_engine()
    turn = request(prompt(30), n_new=5, session="game", temperature=0.9)
    for _ in range(4):  # grows past the first 64 tokens
        (without,) = await serve_separately(new_engine, [turn])
        forward_passes.clear()
        (result,) = await engine.generate([turn])
        n_new = 30 if len(turn.prompt_ids) == 30 else 12  # the last sampled token and 11 observed tokens
        assert forward_passes == [n_new, 1, 1, 1, 1]
        assert result.n_reused == len(turn.prompt_ids) - n_new
        assert_same(result, without, 5e-6)
        assert_agrees(tiny_model, turn, result)
        turn = replace(turn, prompt_ids=turn.prompt_ids + result.token_ids + prompt(11))


async def test_a_shared_prompt_is_read_once(
    new_engine: NewEngine, tiny_model: PreTrainedModel, forward_passes: Passes
) -> None:
    group = [request(prompt(40), seed=s, session=str(s), temperature=0.7) for s in range(4)]
    other = request(prompt(10), session="other")
    results = await new_engine().generate([group[0], other, *group[1:]])
    assert forward_passes[:3] == [40 + 10, 2 + 3, 5]  # the three others read the last token of the prompt
    assert [result.n_reused for result in results] == [0, 0, 39, 39, 39]
    assert len({tuple(result.token_ids) for result in results}) == 5
    for r, result in zip([group[0], other, *group[1:]], results, strict=True):
        assert_agrees(tiny_model, r, result)


async def test_a_shared_prompt_stays_while_a_sample_runs(new_engine: NewEngine, forward_passes: Passes) -> None:
    engine = new_engine(max_num_seqs=4)

    async def play(seed: int) -> None:
        await engine.generate([request(prompt(200), n_new=4 + 3 * seed, seed=seed, session=str(seed))])
        await engine.end_session(str(seed))

    await asyncio.gather(*(play(seed) for seed in range(8)))
    assert [n_tokens for n_tokens in forward_passes if n_tokens >= 199] == [200]


async def test_a_late_sample_of_a_group_does_not_read_its_prompt(
    new_engine: NewEngine, forward_passes: Passes, eventually: Callable[[Callable[[], bool]], Awaitable[None]]
) -> None:
    engine, late = new_engine(), request(prompt(100), seed=77)
    (expected,) = await serve_separately(new_engine, [late])
    forward_passes.clear()
    first = asyncio.create_task(engine.generate([request(prompt(100), n_new=40)]))
    await eventually(lambda: len(forward_passes) > 3)
    (result,) = await engine.generate([late])
    assert_same(result, expected, 5e-6)
    await first
    assert max(forward_passes[1:]) == 2


async def test_the_same_and_a_longer_prompt_without_a_session_read_new_tokens(
    new_engine: NewEngine, forward_passes: Passes
) -> None:
    engine = new_engine()
    await engine.generate([request(prompt(20), n_new=9)])
    (again,) = await engine.generate([request(prompt(20), n_new=9, seed=5)])
    assert again.n_reused == 19
    (first,) = await engine.generate([request(prompt(100), n_new=30)])
    longer = request(prompt(100) + first.token_ids + prompt(20))
    (expected,) = await serve_separately(new_engine, [longer])
    forward_passes.clear()
    (second,) = await engine.generate([longer])
    assert forward_passes[0] == 21  # the last token of the first response was never read
    assert second.n_reused == 100 + len(first.token_ids) - 1
    assert_same(second, expected, 5e-6)


async def test_bfloat16_autocast_runs_on_float32_weights(
    tiny_model: PreTrainedModel, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, rotary embeddings return float32 keys, and values are bfloat16."""
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    monkeypatch.setattr("skyrl_train.inference_engines.hf.packed.autocast", lambda device, bf16: autocast)
    engine = new_engine(tiny_model, bf16=True)
    (first,) = await engine.generate([request(prompt(9), session="s")])
    turn = request(prompt(9) + first.token_ids + prompt(4), session="s")
    (second,) = await engine.generate([turn])
    with autocast:
        assert second.logprobs == pytest.approx(trainer_logprobs(tiny_model, turn, second), abs=0.02)
    pools = [pool for layer in engine._memory._layers.values() for pool in layer]
    assert {pool.dtype for pool in pools} == {torch.bfloat16}


@pytest.mark.parametrize("n_cached", [4000, 1200], ids=["much memory", "little memory"])
async def test_samples_of_shared_prompts_get_the_tokens_of_separate_ones(
    new_engine: NewEngine, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, n_cached: int
) -> None:
    monkeypatch.setattr(attention, "MIN_SAVED", 1)
    shared_calls = []
    attend_shared = attention._attend_shared
    monkeypatch.setattr(attention, "_attend_shared", lambda *args: shared_calls.append(1) or attend_shared(*args))
    prompts = [prompt(70) + prompt(length, seed=1) for length in (3, 60, 80)]
    engine = new_engine(max_num_batched_tokens=100, max_cache_bytes=n_cached * cache_bytes_per_token(tiny_model))

    async def play(number: int) -> list[tuple[EngineRequest, EngineResult]]:
        turns, prompt_ids = [], prompts[number % 3]
        for turn in range(2):
            asked = request(prompt_ids, n_new=5 + number, seed=10 * number + turn, session=f"s{number}")
            (result,) = await engine.generate([asked])
            turns.append((asked, result))
            prompt_ids = prompt_ids + result.token_ids + [5, 6]
        return turns

    played = [turn for turns in await asyncio.gather(*map(play, range(9))) for turn in turns]
    assert shared_calls
    monkeypatch.setattr(attention, "MIN_SAVED", 10**12)
    separate = await serve_separately(new_engine, [asked for asked, _ in played])
    assert_all_same([result for _, result in played], separate)
