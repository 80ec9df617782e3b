"""What the embedded engine generates is what the model would, one sequence at a time, without any cache."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.inference_engines.base import EngineRequest, EngineResult, SamplingParams
from skyrl_train.inference_engines.hf import HFEngine
from skyrl_train.models.logprobs import response_logprobs

NewEngine = Callable[..., HFEngine]
Passes = list[int]


def prompt(length: int, seed: int = 0, vocab_size: int = 61) -> list[int]:
    """Random tokens, none of them special."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def request(
    prompt_ids: list[int], n_new: int = 8, seed: int = 0, session: str | None = None, **sampling: Any
) -> EngineRequest:
    return EngineRequest(prompt_ids, SamplingParams(max_new_tokens=n_new, **sampling), seed, session)


def ragged_requests(n: int = 6) -> list[EngineRequest]:
    """Different prompts, lengths, temperatures and seeds; two of them share their prompt."""
    requests = [
        request(prompt(3 + 7 * i, seed=i), n_new=4 + 3 * i, seed=i, temperature=0.5 + 0.25 * i) for i in range(n)
    ]
    return [*requests, replace(requests[2], seed=99)]


def greedy(model: PreTrainedModel, prompt_ids: list[int], n_new: int) -> list[int]:
    """What transformers generates."""
    output = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=n_new,
        eos_token_id=2,
        pad_token_id=0,
    )
    return output[0, len(prompt_ids) :].tolist()


@torch.no_grad()
def trainer_logprobs(model: PreTrainedModel, request: EngineRequest, result: EngineResult) -> list[float]:
    """What the trainer computes for the sampled tokens."""
    sequences = torch.tensor([request.prompt_ids + result.token_ids])
    mask = torch.ones(1, len(result.token_ids))
    temperature = request.sampling.temperature or 1.0
    return response_logprobs(model, sequences, torch.ones_like(sequences), mask, temperature)[0][0].tolist()


def assert_same(actual: EngineResult, expected: EngineResult) -> None:
    assert actual.token_ids == expected.token_ids
    assert actual.stop_reason == expected.stop_reason
    assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


async def alone(new_engine: NewEngine, requests: list[EngineRequest]) -> list[EngineResult]:
    """Each request served with nothing else in the engine, without a session."""
    return [(await new_engine().generate([replace(r, session_id=None)]))[0] for r in requests]


# -- against the model


async def test_greedy_is_what_transformers_generates(new_engine: NewEngine, tiny_model: PreTrainedModel) -> None:
    lengths = [1, 2, 30, 63, 64, 65, 11]  # around the size to which slots grow
    requests = [request(prompt(n), n_new=20, temperature=0.0) for n in lengths]
    results = await new_engine().generate(requests)
    assert [r.token_ids for r in results] == [greedy(tiny_model, r.prompt_ids, 20) for r in requests]


async def test_other_architectures_agree_with_transformers(new_engine: NewEngine, other_model: PreTrainedModel) -> None:
    engine = new_engine(other_model)
    requests = [
        request(prompt(n), n_new=12, temperature=0.0, session=str(n)) for n in (1, 9, 60, 90)
    ]  # a sliding window ends at 64
    first = await engine.generate(requests)
    assert [r.token_ids for r in first] == [greedy(other_model, r.prompt_ids, 12) for r in requests]
    longer = [
        request(r.prompt_ids + result.token_ids + prompt(4), temperature=0.7, session=r.session_id)
        for r, result in zip(requests, first, strict=True)
    ]
    for turn, result in zip(longer, await engine.generate(longer), strict=True):
        assert result.logprobs == pytest.approx(trainer_logprobs(other_model, turn, result), abs=1e-5)


async def test_padding_beside_a_long_session_is_not_past_the_last_position(
    new_engine: NewEngine, other_model: PreTrainedModel
) -> None:
    engine = new_engine(other_model)
    n_long = engine.context_length - 10
    first = request(prompt(n_long), n_new=2, session="long")
    (result,) = await engine.generate([first])
    turn = request(first.prompt_ids + result.token_ids + prompt(3), n_new=4, session="long")
    short = request(prompt(40, seed=1), n_new=4)  # 40 columns for a row with four tokens left to read
    for row, result in zip((turn, short), await engine.generate([turn, short]), strict=True):
        assert result.logprobs == pytest.approx(trainer_logprobs(other_model, row, result), abs=1e-5)


async def test_log_probs_are_the_trainers(new_engine: NewEngine, tiny_model: PreTrainedModel) -> None:
    requests = [*ragged_requests(), request(prompt(9), temperature=0.0), request(prompt(9), top_p=0.5, top_k=20)]
    for r, result in zip(requests, await new_engine().generate(requests), strict=True):
        assert len(result.logprobs) == len(result.token_ids)
        assert result.logprobs == pytest.approx(trainer_logprobs(tiny_model, r, result), abs=1e-5)


async def test_new_weights_are_used_after_a_sync(new_engine: NewEngine, tiny_model: PreTrainedModel) -> None:
    model = copy.deepcopy(tiny_model)
    engine = new_engine(model)
    first = request(prompt(20), session="game", temperature=0.8)
    (before,) = await engine.generate([first])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1).add_(0.01)
    await engine.sync_weights(7)
    second = replace(first, prompt_ids=first.prompt_ids + before.token_ids + prompt(3))
    for r, result in zip([first, second], await engine.generate([first, second]), strict=True):
        assert result.weight_spans == ((7, len(result.token_ids)),)
        assert result.logprobs == pytest.approx(trainer_logprobs(model, r, result), abs=1e-5)
    assert before.weight_spans == ((0, len(before.token_ids)),)
    assert before.logprobs == pytest.approx(trainer_logprobs(tiny_model, first, before), abs=1e-5)


# -- independence


async def test_results_do_not_depend_on_what_else_is_in_the_batch(
    new_engine: NewEngine, forward_passes: Passes
) -> None:
    requests = ragged_requests()
    expected = await alone(new_engine, requests)
    together = await new_engine().generate(requests)
    backwards = await new_engine().generate(requests[::-1])
    one_at_a_time = await new_engine(max_num_seqs=1).generate(requests)
    forward_passes.clear()
    two_at_a_time = await new_engine(max_num_seqs=2).generate(requests)
    assert 2 in forward_passes
    for results in (together, backwards[::-1], one_at_a_time, two_at_a_time):
        for actual, result in zip(results, expected, strict=True):
            assert_same(actual, result)
    assert len({tuple(result.token_ids) for result in expected}) == len(requests)


async def test_the_seed_decides_and_nothing_else(new_engine: NewEngine) -> None:
    engine = new_engine()
    same, again, other = await engine.generate([request(prompt(5), seed=s, n_new=16) for s in (1, 1, 2)])
    assert_same(again, same)
    assert same.token_ids != other.token_ids
    (later,) = await engine.generate([request(prompt(5), seed=1, n_new=16)])
    assert_same(later, same)


async def test_results_do_not_depend_on_the_time_of_arrival(
    new_engine: NewEngine, forward_passes: Passes, eventually: Callable[[Callable[[], bool]], Awaitable[None]]
) -> None:
    requests = ragged_requests()
    expected = await alone(new_engine, requests)
    forward_passes.clear()
    engine = new_engine()
    calls = []
    for n_calls, r in enumerate(requests):
        await eventually(lambda n=n_calls: len(forward_passes) >= 2 * n)
        calls.append(asyncio.create_task(engine.generate([r])))
    for call, result in zip(calls, expected, strict=True):
        assert_same((await call)[0], result)
    assert {2, 3} <= set(forward_passes)  # they did share passes


async def test_no_requests_no_results(new_engine: NewEngine) -> None:
    assert await new_engine().generate([]) == []


# -- what is read


async def test_a_sessions_next_turn_reads_only_what_is_new(
    new_engine: NewEngine, tiny_model: PreTrainedModel, forward_passes: Passes
) -> None:
    engine = new_engine()
    turn = request(prompt(30), n_new=5, session="game", temperature=0.9)
    for _ in range(4):  # grows past the first 64 tokens
        (without,) = await alone(new_engine, [turn])
        forward_passes.clear()
        (result,) = await engine.generate([turn])
        n_new = 30 if len(turn.prompt_ids) == 30 else 12  # the last sampled token and 11 observed ones
        assert forward_passes == [n_new, 1, 1, 1, 1]
        assert result.n_cached == len(turn.prompt_ids) - n_new
        assert_same(result, without)
        assert result.logprobs == pytest.approx(trainer_logprobs(tiny_model, turn, result), abs=1e-5)
        turn = replace(turn, prompt_ids=turn.prompt_ids + result.token_ids + prompt(11))


async def test_a_session_that_changed_its_mind_reads_from_there_on(
    new_engine: NewEngine, forward_passes: Passes
) -> None:
    engine = new_engine()
    first = request(prompt(30), session="game")
    await engine.generate([first])
    edited = replace(first, prompt_ids=[*first.prompt_ids[:20], *prompt(15, seed=5)])
    (expected,) = await alone(new_engine, [edited])
    forward_passes.clear()
    (result,) = await engine.generate([edited])
    assert_same(result, expected)
    assert forward_passes[0] == 15
    forward_passes.clear()
    (shorter,) = await engine.generate([replace(first, prompt_ids=first.prompt_ids[:10])])
    assert forward_passes[0] == 1  # one token is always read: its logits are needed
    assert_same(shorter, (await alone(new_engine, [replace(first, prompt_ids=first.prompt_ids[:10])]))[0])


async def test_an_ended_session_is_read_anew(new_engine: NewEngine, forward_passes: Passes) -> None:
    engine = new_engine()
    await engine.generate([request(prompt(30), session="game")])
    engine.end_session("game")
    engine.end_session("never heard of")
    forward_passes.clear()
    await engine.generate([request(prompt(30), session="game")])
    assert forward_passes[0] == 30


async def test_a_shared_prompt_is_read_once(
    new_engine: NewEngine, tiny_model: PreTrainedModel, forward_passes: Passes
) -> None:
    group = [request(prompt(40), seed=s, session=str(s), temperature=0.7) for s in range(4)]
    other = request(prompt(10), session="other")
    results = await new_engine().generate([group[0], other, *group[1:]])
    assert forward_passes[:3] == [40 + 10, 2 + 3, 5]  # the three others read the last token of the prompt
    assert [result.n_cached for result in results] == [0, 0, 39, 39, 39]
    assert len({tuple(result.token_ids) for result in results}) == 5
    for r, result in zip([group[0], other, *group[1:]], results, strict=True):
        assert result.logprobs == pytest.approx(trainer_logprobs(tiny_model, r, result), abs=1e-5)


async def test_long_prompts_are_read_in_chunks_while_others_go_on(
    new_engine: NewEngine, forward_passes: Passes
) -> None:
    requests = [request(prompt(5), n_new=20), request(prompt(300, seed=1), n_new=4), request(prompt(90, seed=2))]
    expected = await alone(new_engine, requests)
    forward_passes.clear()
    for actual, result in zip(await new_engine(max_num_batched_tokens=70).generate(requests), expected, strict=True):
        assert_same(actual, result)
    assert forward_passes[:7] == [5 + 65, 1 + 69, 1 + 69, 1 + 69, 1 + 28 + 41, 1 + 1 + 49, 3]


async def test_bfloat16_autocast_runs_on_float32_weights(
    tiny_model: PreTrainedModel, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: keys leave the rotary embedding in float32 and values in bfloat16."""
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    monkeypatch.setattr("skyrl_train.inference_engines.hf.engine.autocast", lambda device, bf16: autocast)
    engine = new_engine(tiny_model, bf16=True)
    (first,) = await engine.generate([request(prompt(9), session="s")])
    (second,) = await engine.generate([request(prompt(9) + first.token_ids + prompt(4), session="s")])
    assert len(first.token_ids) == len(second.token_ids) == 8
