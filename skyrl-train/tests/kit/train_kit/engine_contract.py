"""The contract of inference engines: subclass `EngineContract` and provide a fixture `engine_kit`.

The tests use only the protocol, because the engine may be in another process. Tests of threads or internals belong to
the test module of the backend. A wrapper of engines that cannot break a part of the contract, such as the
distribution of sampled tokens, runs the other parts.
"""

import asyncio
import copy
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from string import ascii_lowercase
from typing import Any, ClassVar

import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.errors import EngineError, OutOfMemoryError
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, SamplingParams, TokenChunk
from train_kit.engines import EngineKit, Listener, assert_agrees, assert_same, start
from train_kit.shortages import SHORTAGES
from train_kit.vision_models import ask, picture

LONG = {"n_new": 400, "ignore_eos": True}  # still running during the test
B_TO_Z = ascii_lowercase[1:]
SHAPED: list[dict[str, Any]] = [
    {"top_p": 0.6},
    {"top_k": 5},
    {"min_p": 0.4},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9},
    {"min_new_tokens": 12, "stop_token_ids": (7, 8, 9)},
    {"top_p": 0.8, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
]

ENDINGS: list[tuple[dict[str, Any], str, str]] = [
    ({}, f"{B_TO_Z}7<|im_end|>", "stop"),
    ({"max_new_tokens": 5}, "bcdef", "length"),
    ({"stop": ("fgh",)}, "bcdefgh", "stop"),
    ({"stop": ("fgh",), "max_new_tokens": 7}, "bcdefgh", "stop"),  # the last allowed token completes it
    ({"stop": ("fgh",), "max_new_tokens": 6}, "bcdefg", "length"),
    ({"stop": ("xyz", "q", "fgi")}, "bcdefghijklmnopq", "stop"),  # whichever comes first
    ({"stop": ("abc", "uvw")}, "bcdefghijklmnopqrstuvw", "stop"),  # the a of the prompt does not count
    ({"stop": ("cde",), "min_new_tokens": 9}, f"{B_TO_Z}7<|im_end|>", "stop"),
    ({"stop": ("cde",), "min_new_tokens": 5}, f"{B_TO_Z}7<|im_end|>", "stop"),  # completed too early
    ({"stop": ("cde",), "min_new_tokens": 4}, "bcde", "stop"),
    ({"stop_tokens": "m"}, "bcdefghijklm", "stop"),
    ({"ignore_eos": True, "max_new_tokens": 30}, f"{B_TO_Z}7<|im_end|>abc", "length"),
    ({"ignore_eos": True, "stop": ("7",)}, f"{B_TO_Z}7", "stop"),
]


class SamplingContract:
    """Tokens and log-probs, compared with the policy's own model."""

    async def test_greedy_sampling_equals_transformers(self, engine_kit: EngineKit) -> None:
        lengths = [1, 2, 31, 32, 33, 63, 64, 65, 200]  # around the sizes at which caches grow
        requests = [engine_kit.request(n, 8, seed=n, temperature=0.0) for n in lengths]
        results = await engine_kit.new().generate(requests)
        assert [r.token_ids for r in results] == [engine_kit.greedy(r.prompt_ids, 8) for r in requests]

    async def test_log_probs_equal_the_trainers_at_the_request_temperature(self, engine_kit: EngineKit) -> None:
        temperatures = (0.0, 0.4, 1.0, 1.7)
        requests = [engine_kit.request(9 + 20 * i, 12, seed=i, temperature=t) for i, t in enumerate(temperatures)]
        for request, result in zip(requests, await engine_kit.new().generate(requests), strict=True):
            assert_agrees(engine_kit, request, result)
            assert result.sampling_logprobs is result.top_logprobs is None

    async def test_penalties_and_truncation_change_sampling_and_not_the_log_probs(self, engine_kit: EngineKit) -> None:
        requests = [
            engine_kit.request(20, 16, seed=seed, temperature=temperature, **options)
            for seed, options in enumerate(SHAPED)
            for temperature in (1.0, 0.7)
        ]
        for request, result in zip(requests, await engine_kit.new().generate(requests), strict=True):
            assert_agrees(engine_kit, request, result)
            shaped = engine_kit.sampling_logprobs(request, result)
            assert result.sampling_logprobs == pytest.approx(shaped, abs=engine_kit.tolerance)

    async def test_top_log_probs_on_request(self, engine_kit: EngineKit) -> None:
        plain = engine_kit.request(20, 6, temperature=0.6, top_p=0.9)
        top = replace(plain, sampling=replace(plain.sampling, n_top_logprobs=3))
        without, with_top = await engine_kit.new().generate([plain, top])
        assert without.top_logprobs is None
        logprobs = (engine_kit.logits(top, with_top) / 0.6).log_softmax(-1)
        assert with_top.top_logprobs is not None
        for row, top_logprobs in zip(logprobs, with_top.top_logprobs, strict=True):
            values, token_ids = row.topk(3)
            expected_row = dict(zip(token_ids.tolist(), values.tolist(), strict=True))
            assert top_logprobs == pytest.approx(expected_row, abs=engine_kit.tolerance)

    async def test_tokens_follow_the_distribution_of_the_model(self, engine_kit: EngineKit) -> None:
        n = 600
        one = engine_kit.request(20, 1, temperature=0.5)
        requests = [replace(one, seed=seed) for seed in range(n)]
        results = await engine_kit.new(max_num_seqs=64).generate(requests)
        probs = (engine_kit.logits(one, results[0])[0] / 0.5).softmax(-1)
        counts = torch.bincount(torch.tensor([r.token_ids[0] for r in results]), minlength=len(probs)).float()
        largest = probs.topk(5).indices
        expected = torch.cat([probs[largest], 1 - probs[largest].sum(dim=0, keepdim=True)]) * n
        observed = torch.cat([counts[largest], n - counts[largest].sum(dim=0, keepdim=True)])
        assert ((observed - expected).square() / expected).sum() < 20.5  # 5 degrees of freedom: one in a thousand

    async def test_sampled_tokens_depend_on_the_seed_alone(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        requests = [engine_kit.request(5 + 3 * i, 8, seed=i) for i in range(3)]
        *batched, same, other = await engine.generate([*requests, requests[1], replace(requests[1], seed=99)])
        assert_same(same, batched[1], engine_kit.tolerance)
        assert other.token_ids != batched[1].token_ids
        for request, expected in zip(requests, batched, strict=True):
            (single,) = await engine.generate([request])
            assert_same(single, expected, engine_kit.tolerance)


class CallContract:
    """Concurrent calls: each gets its own tokens, and only calls that cannot be served are rejected."""

    async def test_results_are_in_the_order_of_their_requests(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new(max_num_seqs=2)
        assert await engine.generate([]) == []
        lengths = [9, 1, 5, 3]
        requests = [engine_kit.request(10, n, seed=i, ignore_eos=True) for i, n in enumerate(lengths)]
        results = await engine.generate(requests)
        assert [len(r.token_ids) for r in results] == lengths
        assert {r.stop_reason for r in results} == {"length"}
        for request, result in zip(requests, results, strict=True):
            assert_agrees(engine_kit, request, result)

    async def test_simultaneous_calls(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        requests = [[engine_kit.request(10 + i, 8, seed=10 * i + j) for j in range(3)] for i in range(3)]
        batched = await asyncio.gather(*(engine.generate(group) for group in requests))
        for group, results in zip(requests, batched, strict=True):
            for result, expected in zip(results, await engine.generate(group), strict=True):
                assert_same(result, expected, engine_kit.tolerance)

    async def test_a_stream_yields_tokens_as_they_are_sampled(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        requests = [engine_kit.request(10, 6, ignore_eos=True), engine_kit.request(12, 9, ignore_eos=True)]
        listeners = [Listener(engine, request) for request in requests]
        results = [await listener.result() for listener in listeners]
        assert sum(len(listener.chunks) for listener in listeners) == 15
        for listener, result in zip(listeners, results, strict=True):
            assert listener.token_ids == result.token_ids
            assert listener.logprobs == result.logprobs
            assert [chunk.result for chunk in listener.chunks[:-1]] == [None] * (len(listener.chunks) - 1)
        for result, expected in zip(results, await engine.generate(requests), strict=True):
            assert_same(result, expected, engine_kit.tolerance)

    async def test_a_stream_includes_the_tokens_that_end_the_response(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        requests = [
            engine_kit.request(9, 60, seed=seed, temperature=3 * engine_kit.temperature, stop=tuple("aeiou"))
            for seed in range(8)
        ]
        listeners = [Listener(engine, request) for request in requests]
        expected = await engine.generate(requests)
        assert "stop" in {result.stop_reason for result in expected}
        for listener, result in zip(listeners, expected, strict=True):
            assert_same(await listener.result(), result, engine_kit.tolerance)
            assert listener.token_ids == result.token_ids

    async def test_only_the_call_of_a_request_that_cannot_be_served_is_refused(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        n, last = engine.info.context_length, len(engine_kit.tokenizer) - 1
        served = asyncio.create_task(engine.generate([engine_kit.request(10, 20, ignore_eos=True)]))
        plain, unknown_stop = SamplingParams(4), SamplingParams(4, 2, stop_token_ids=(-1, 7, 99_999))
        for prompt_ids, sampling, message in (
            *(([5] * k, plain, f"a prompt of {k} tokens: .* between 1 and {n - 1}") for k in (0, n, n + 88)),
            *(([5, i, 6], plain, rf"a prompt with token {i}: .* 0 to {last}") for i in (-1, 10_000)),
            ([5] * 5, unknown_stop, rf"stop_token_ids=\[-1, 99999\]: valid tokens are 0 to {last}"),
        ):
            refused = EngineRequest(prompt_ids, sampling, seed=0)
            for call in (engine.generate([engine_kit.request(5), refused]), Listener(engine, refused).result()):
                with pytest.raises(EngineError, match=message):
                    await call
        assert len((await served)[0].token_ids) == 20

    @pytest.mark.parametrize("how", ["closes the generator", "raises"])
    async def test_a_consumer_that_stops_early_cancels_only_its_own_request(
        self, engine_kit: EngineKit, how: str
    ) -> None:
        async def consume(chunks: AsyncGenerator[TokenChunk, None]) -> None:
            async with aclosing(chunks):
                async for chunk in chunks:
                    assert chunk.result is None
                    if how == "raises":
                        raise ValueError("not interested")
                    await chunks.aclose()

        engine = engine_kit.new()
        kept = engine_kit.request(10, 16, ignore_eos=True)
        (expected,) = await engine.generate([kept])
        others = [start(engine, kept, method) for method in ("generate", "stream")]
        consumers = [asyncio.create_task(consume(engine.stream(engine_kit.request(n, **LONG)))) for n in (5, 6)]
        for consumer in consumers:
            if how == "raises":
                with pytest.raises(ValueError, match="not interested"):
                    await consumer
            else:
                await consumer
        for other in others:
            assert_same(await other, expected, engine_kit.tolerance)
        await engine_kit.sync(engine, 1)  # refused while requests are unfinished
        assert_same((await engine.generate([kept]))[0], expected, engine_kit.tolerance)


class EndingContract:
    """Ends of a response: EOS token, stop string, stop token, or limit."""

    endings: ClassVar[list[tuple[dict[str, Any], str, str]]] = ENDINGS
    """Request options, response, and stop reason, for a policy that spells the alphabet."""

    async def test_a_response_ends_at_eos_stop_string_stop_token_or_limit(self, engine_kit: EngineKit) -> None:
        engine_kit.teach_spelling()
        engine = engine_kit.new()
        await engine_kit.sync(engine, 1)
        prompt_ids, requests = engine_kit.tokenizer.convert_tokens_to_ids(["a"]), []
        for options, _, _ in self.endings:
            stop_ids = tuple(engine_kit.tokenizer.convert_tokens_to_ids([*options.get("stop_tokens", "")]))
            sampling = {name: value for name, value in options.items() if name != "stop_tokens"}
            sampling = {
                "max_new_tokens": 100,
                "stop_token_ids": stop_ids,
                "temperature": engine_kit.temperature,
                **sampling,
            }
            requests.append(EngineRequest(prompt_ids, SamplingParams(**sampling), seed=0))
        results = await engine.generate(requests)
        found = [(engine_kit.tokenizer.decode(result.token_ids), result.stop_reason) for result in results]
        for (options, *expected), ending in zip(self.endings, found, strict=True):
            assert ending == tuple(expected), options

    async def test_no_response_ends_before_min_new_tokens(self, engine_kit: EngineKit) -> None:
        engine_kit.teach_spelling()  # samples the EOS token after z
        engine = engine_kit.new()
        await engine_kit.sync(engine, 1)
        prompt_ids = engine_kit.tokenizer.convert_tokens_to_ids(["s"])
        sampling = SamplingParams(40, min_new_tokens=40)
        for result in await engine.generate([EngineRequest(prompt_ids, sampling, seed) for seed in range(4)]):
            assert (len(result.token_ids), result.stop_reason) == (40, "length")
            assert engine_kit.eos_id not in result.token_ids

    async def test_a_response_ends_with_the_context(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        n = engine.info.context_length
        assert n == engine_kit.model.config.max_position_embeddings - engine_kit.n_reserved_tokens
        assert engine.info.longest_sequence == n  # the engines under test have room for it
        request = engine_kit.request(n - 4, 50, ignore_eos=True)
        (result,) = await engine.generate([request])
        assert (len(result.token_ids), result.stop_reason) == (4, "length")
        assert_agrees(engine_kit, request, result)


class CacheContract:
    """Turns of a session, whose earlier tokens are cached."""

    async def test_every_turn_of_a_session_reuses_its_cache_and_agrees_with_the_trainer(
        self, engine_kit: EngineKit
    ) -> None:
        engine = engine_kit.new()
        turns = [
            engine_kit.request(100, 10, seed=seed, session=session, temperature=0.8, ignore_eos=True)
            for seed, session in enumerate(["a", "b", None])
        ]
        for n_turn in range(3):
            results = await engine.generate(turns)
            for i, (turn, result) in enumerate(zip(turns, results, strict=True)):
                assert_agrees(engine_kit, turn, result)
                if n_turn and turn.session_id:
                    assert len(turn.prompt_ids) - 12 - engine_kit.cache_block_size < result.n_reused
                assert 0 <= result.n_reused < len(turn.prompt_ids)
                observation = engine_kit.prompt(11, seed=i)
                turns[i] = replace(turn, prompt_ids=turn.prompt_ids + result.token_ids + observation)

    async def test_an_edited_session_reuses_tokens_before_the_edit(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        first = engine_kit.request(150, 8, session="game")
        (result,) = await engine.generate([first])
        assert result.n_reused == 0
        edited = replace(first, prompt_ids=[*first.prompt_ids[:100], *engine_kit.prompt(40, seed=5)])
        (result,) = await engine.generate([edited])
        assert 100 - engine_kit.cache_block_size < result.n_reused <= 100
        assert_agrees(engine_kit, edited, result)

    async def test_an_ended_session_starts_again(self, engine_kit: EngineKit) -> None:
        engine, request = engine_kit.new(), engine_kit.request(80, 8, session="game")
        (first,) = await engine.generate([request])
        await engine.end_session("game")
        await engine.end_session("unknown")
        assert_same((await engine.generate([request]))[0], first, engine_kit.tolerance)

    async def test_long_prompts_are_read_in_chunks(self, engine_kit: EngineKit) -> None:
        requests = [engine_kit.request(n, 10, seed=n) for n in (5, 300, 90)]
        results = await engine_kit.new(max_num_batched_tokens=64).generate(requests)
        for request, result in zip(requests, results, strict=True):
            assert_agrees(engine_kit, request, result)


class WeightContract:
    """New weights, between responses and in the middle of one."""

    samplings_of_nan: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"temperature": 0.0}, {"top_p": 0.9})
    """Sampling options of the requests to a model with NaN weights."""

    async def test_new_weights_are_used_after_a_sync(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        request = engine_kit.request(100, 8, session="game", temperature=0.8, ignore_eos=True)
        for version in range(3):
            (result,) = await engine.generate([request])
            assert result.weight_spans == ((version, 8),)
            assert result.n_reused == 0  # the cache of other weights is cleared
            assert_agrees(engine_kit, request, result)
            engine_kit.add_noise(seed=version)
            outdated = engine_kit.trainer_logprobs(request, result)
            assert result.logprobs != pytest.approx(outdated, abs=10 * engine_kit.tolerance)
            await engine_kit.sync(engine, version + 1)
        top = engine_kit.request(40, 6, temperature=0.0, ignore_eos=True)
        assert (await engine.generate([top]))[0].token_ids == engine_kit.greedy(top.prompt_ids, 6)

    async def test_a_sync_during_generation_is_refused(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        listeners = [Listener(engine, engine_kit.request(n, **LONG)) for n in (10, 11)]
        for listener in listeners:
            await listener.wait_for(2)
        with pytest.raises(EngineError, match="version 3 while 2 sequences were being generated"):
            await engine_kit.sync(engine, 3)
        await engine.abort()
        assert {span.version for listener in listeners for span in (await listener.result()).weight_spans} == {0}
        await engine_kit.sync(engine, 3)
        assert (await engine.generate([engine_kit.request(10, 1)]))[0].weight_spans == ((3, 1),)

    async def test_new_weights_in_the_middle_of_a_response(self, engine_kit: EngineKit) -> None:
        engine, before = engine_kit.new(), copy.deepcopy(engine_kit.model)
        request = engine_kit.request(70, 60, ignore_eos=True)
        listener = Listener(engine, request)
        await listener.wait_for(5)
        await engine.pause()
        n_before = await listener.settle()
        engine_kit.add_noise()
        await engine_kit.sync(engine, 5)
        await engine.resume()
        result = await listener.result()
        assert listener.token_ids == result.token_ids
        assert result.weight_spans == ((0, n_before), (5, 60 - n_before))
        old = replace(engine_kit, model=before).trainer_logprobs(request, result)
        new = engine_kit.trainer_logprobs(request, result)
        assert result.logprobs == pytest.approx([*old[:n_before], *new[n_before:]], abs=engine_kit.tolerance)

    async def test_nan_weights_are_reported(self, engine_kit: EngineKit) -> None:
        engine, request = engine_kit.new(), engine_kit.request(40, 4)
        (expected,) = await engine.generate([request])
        weight = engine_kit.model.lm_head.weight
        healthy = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(torch.nan)
        await engine_kit.sync(engine, 1)
        for options in self.samplings_of_nan:
            with pytest.raises(EngineError, match=r"logits are not finite \(weight version 1\)"):
                await engine.generate([engine_kit.request(40, 4, **options)])
        with torch.no_grad():
            weight.copy_(healthy)
        await engine_kit.sync(engine, 2)
        assert_same((await engine.generate([request]))[0], expected, engine_kit.tolerance)


class ControlContract:
    """Abort, pause, cancellation, sleep and close, of requests that run or wait."""

    async def test_an_aborted_session_returns_its_tokens_so_far(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        kept, aborted = engine_kit.request(10, 20, session="kept"), engine_kit.request(11, session="game", **LONG)
        expected = await engine.generate(
            [kept, replace(aborted, sampling=replace(aborted.sampling, max_new_tokens=60))]
        )
        listeners = [Listener(engine, kept), Listener(engine, aborted)]
        await listeners[1].wait_for(5)
        await engine.abort("game")
        await engine.abort("another")
        result, cut = [await listener.result() for listener in listeners]
        assert_same(result, expected[0], engine_kit.tolerance)
        assert cut.stop_reason == "abort"
        n = len(cut.token_ids)
        assert 3 < n < 60
        assert cut.token_ids == listeners[1].token_ids == expected[1].token_ids[:n]
        assert cut.logprobs == pytest.approx(expected[1].logprobs[:n], abs=2 * engine_kit.tolerance)

    async def test_an_abort_ends_all_requests_including_waiting_and_paused_ones(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new(max_num_seqs=1)
        running = Listener(engine, engine_kit.request(10, **LONG))
        await running.wait_for(1)
        waiting = Listener(engine, engine_kit.request(11, **LONG))
        await running.wait_for(5)
        await engine.pause()
        n_before = await running.settle()
        await engine.abort()
        cut, dropped = await running.result(), await waiting.result()
        assert cut.stop_reason == dropped.stop_reason == "abort"
        assert len(cut.token_ids) == running.n_tokens == n_before
        assert (dropped.token_ids, dropped.logprobs) == ([], [])
        assert waiting.n_tokens == 0
        await engine.resume()
        assert len((await engine.generate([engine_kit.request(10, 4, ignore_eos=True)]))[0].token_ids) == 4

    async def test_a_paused_engine_keeps_its_requests_and_continues_them(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        request = engine_kit.request(10, 50, ignore_eos=True)
        (expected,) = await engine.generate([request])
        listener = Listener(engine, request)
        await listener.wait_for(2)
        await engine.pause()
        with pytest.raises(EngineError, match="paused already"):
            await engine.pause()
        n_before = await listener.settle()
        late = Listener(engine, engine_kit.request(12, 4, ignore_eos=True))
        await asyncio.sleep(0.1)
        assert (listener.n_tokens, late.n_tokens) == (n_before, 0)
        assert not listener.task.done()
        await engine.resume()
        assert_same(await listener.result(), expected, engine_kit.tolerance)
        assert len((await late.result()).token_ids) == 4
        with pytest.raises(EngineError, match="not paused"):
            await engine.resume()

    @pytest.mark.parametrize("method", ["generate", "stream"])
    async def test_a_cancelled_call_stops_without_affecting_others(self, engine_kit: EngineKit, method: str) -> None:
        engine = engine_kit.new(max_num_seqs=2)
        kept = engine_kit.request(10, 16, ignore_eos=True)
        (expected,) = await engine.generate([kept])
        running = start(engine, engine_kit.request(11, **LONG), method)
        clock = Listener(engine, engine_kit.request(13, **LONG))  # one token a step
        await clock.wait_for(1)
        waiting = start(engine, engine_kit.request(12, **LONG), method)
        served = start(engine, kept, "generate")
        await clock.wait_for(5)
        running.cancel()
        waiting.cancel()
        assert_same(await served, expected, engine_kit.tolerance)
        assert clock.n_tokens < 100  # `served` started at once, because cancelled requests take no further steps
        for task in (running, waiting):
            with pytest.raises(asyncio.CancelledError):
                await task
        clock.task.cancel()
        await asyncio.wait([clock.task])
        await engine_kit.sync(engine, 1)
        assert_same((await engine.generate([kept]))[0], expected, engine_kit.tolerance)

    async def test_an_engine_sleeps_when_nothing_runs_and_wakes_up(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        request = engine_kit.request(50, 8, session="s")
        (expected,) = await engine.generate([request])
        for _ in range(2):
            await engine.sleep()
        for call in (engine.generate([request]), Listener(engine, request).result(), engine_kit.sync(engine, 1)):
            with pytest.raises(EngineError, match=r"asleep; call wake_up\(\) first"):
                await call
        for _ in range(2):
            await engine.wake_up()
        (result,) = await engine.generate([request])
        assert_same(result, expected, engine_kit.tolerance)
        assert result.n_reused == 0
        listener = Listener(engine, engine_kit.request(10, **LONG))
        await listener.wait_for(2)
        with pytest.raises(EngineError, match="cannot sleep while 1 sequences"):
            await engine.sleep()
        await engine.abort()
        await listener.result()

    async def test_an_engine_wakes_up_in_two_stages(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new()
        request = engine_kit.request(50, 8, ignore_eos=True)
        await engine.generate([request])
        await engine.sleep()
        await engine.wake_up("weights")
        with pytest.raises(EngineError, match=r"asleep; call wake_up\(\) first"):
            await engine.generate([request])
        await engine.sleep()
        with pytest.raises(EngineError, match=r"asleep; call wake_up\(\) first"):
            await engine_kit.sync(engine, 1)
        await engine.wake_up("weights")
        engine_kit.add_noise()
        await engine_kit.sync(engine, 1)
        await engine.wake_up()
        (result,) = await engine.generate([request])
        assert result.weight_spans == ((1, 8),)
        assert_agrees(engine_kit, request, result)

    async def test_close_fails_all_waiting_calls(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new(max_num_seqs=1)
        listener = Listener(engine, engine_kit.request(10, **LONG))
        await listener.wait_for(1)  # a server may receive concurrent requests in another order
        methods = ("generate", "generate", "stream")
        calls = [listener.task, *(start(engine, engine_kit.request(10, **LONG), method) for method in methods)]
        await listener.wait_for(2)
        await engine.close()  # in the middle of a step
        outcomes: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineError] * 4
        assert all("closed" in str(outcome) for outcome in outcomes)
        await engine.close()
        late = engine_kit.request(10, 1)
        for call in (engine.generate([late]), Listener(engine, late).result()):
            with pytest.raises(EngineError, match="the engine is closed"):
                await call


class EngineContract(SamplingContract, CallContract, EndingContract, CacheContract, WeightContract, ControlContract):
    """All guarantees of `InferenceEngine`."""


class InProcessContract(EngineContract):
    """The engine contract, and threads of this process."""

    async def test_close_during_a_step_leaves_no_thread(self, engine_kit: EngineKit) -> None:
        threads = set(threading.enumerate())
        await self.test_close_fails_all_waiting_calls(engine_kit)
        assert set(threading.enumerate()) <= threads


class ShortageContract:
    """Shortages of memory in the process of the test."""

    @pytest.mark.parametrize(
        "does_not_fit",
        [
            pytest.param(lambda shape: shape.numel() > 70, id="prompts"),
            pytest.param(lambda shape: max(shape) < 10 and shape.numel() > 3, id="sequences"),
        ],
    )
    async def test_a_step_without_memory_is_repeated_in_parts_with_the_same_samples(
        self, engine_kit: EngineKit, does_not_fit: Callable[[torch.Size], bool], caplog: pytest.LogCaptureFixture
    ) -> None:
        engine, unlimited = engine_kit.new(), engine_kit.new()
        requests = [engine_kit.request(64, 6, seed, ignore_eos=True) for seed in range(8)]
        expected = await unlimited.generate(requests)
        with _exhausting(engine_kit.model, does_not_fit):
            results = await engine.generate(requests)
        assert "It is repeated with generator.max_num_seqs=" in caplog.text
        for result, first in zip(results, expected, strict=True):
            assert_same(result, first, engine_kit.tolerance)

    async def test_a_sequence_that_does_not_fit_alone_fails_its_callers_and_the_engine_remains_usable(
        self, engine_kit: EngineKit
    ) -> None:
        engine = engine_kit.new()
        requests = [engine_kit.request(n, 4) for n in (30, 40)]
        with _exhausting(engine_kit.model, lambda _: True):
            failures = await asyncio.gather(*(engine.generate([r]) for r in requests), return_exceptions=True)
        assert [type(failure) for failure in failures] == [OutOfMemoryError] * 2
        assert "One sequence alone does not fit" in str(failures[0])
        for request, result in zip(requests, await engine.generate(requests), strict=True):
            assert_agrees(engine_kit, request, result)


@contextmanager
def _exhausting(model: PreTrainedModel, does_not_fit: Callable[[torch.Size], bool]) -> Iterator[None]:
    """Let forward passes run out of memory if the shape of their tokens does not fit."""

    def check(_module: object, _args: object, kwargs: dict[str, Any]) -> None:
        if does_not_fit(kwargs["input_ids"].shape):
            raise SHORTAGES["cuda"]()

    hook = model.base_model.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


class ImageContract:
    """Images: subclass it with a fixture `image_kit` of a vision-language model."""

    async def test_log_probs_after_images_equal_the_trainers(self, image_kit: EngineKit) -> None:
        """In groups, over two turns, beside text, and after an update of the image encoder."""
        engine, chat = image_kit.new(), ChatEncoder(image_kit.tokenizer)
        assert engine.info.reads_images
        prompts = [
            ask(picture(0), "What is it? ", picture(1, 64, 32)),
            ask("Only text."),
            ask(picture(3), "What is it?"),
            ask(picture(0), "What is it? ", picture(1, 64, 32)),
        ]
        for version in range(2):
            requests = []
            for seed, prompt in enumerate(prompts):
                ids = chat.prompt_ids(prompt)
                sampling = SamplingParams(5, ignore_eos=True)
                session, spans = f"{version}-{seed}", tuple(chat.find_spans(ids, prompt))
                requests.append(EngineRequest(ids, sampling, 100 * version + seed, session, spans))
            for _ in range(2):
                results = await engine.generate(requests)
                for request, result in zip(requests, results, strict=True):
                    assert_agrees(image_kit, request, result)
                requests = [
                    self._next_turn(chat, request, result, ask("And this? ", picture(10 + i)))
                    for i, (request, result) in enumerate(zip(requests, results, strict=True))
                ]
            image_kit.add_noise(scale=0.05, seed=version)
            await image_kit.sync(engine, version + 1)

    @staticmethod
    def _next_turn(
        chat: ChatEncoder, request: EngineRequest, result: EngineResult, turn: list[dict[str, Any]]
    ) -> EngineRequest:
        before = request.prompt_ids + result.token_ids
        ids = chat.observation_ids(turn, before[-1])
        spans = [span.shift(len(before)) for span in chat.find_spans(ids, turn)]
        return replace(request, prompt_ids=before + ids, images=(*request.images, *spans), seed=request.seed + 50)

    async def test_other_images_of_the_same_size_give_other_log_probs(self, image_kit: EngineKit) -> None:
        """A cache of prefixes must not confuse them, though their tokens are equal."""
        engine, chat = image_kit.new(), ChatEncoder(image_kit.tokenizer)
        found = []
        for seed in (0, 1):
            prompt = ask(picture(seed), "What is it? " * 3)
            ids = chat.prompt_ids(prompt)
            images = tuple(chat.find_spans(ids, prompt))
            (result,) = await engine.generate([EngineRequest(ids, SamplingParams(1, temperature=0.0), 0, "s", images)])
            found.append(result.logprobs)
        assert found[0] != pytest.approx(found[1], abs=10 * image_kit.tolerance)

    async def test_a_placeholder_outside_of_images_is_text(self, image_kit: EngineKit) -> None:
        """A model may sample it in any turn, before and after images."""
        engine, chat = image_kit.new(), ChatEncoder(image_kit.tokenizer)
        placeholder = image_kit.model.config.image_token_id
        prompt = ask(picture(0), "What is it? ", picture(1, 64, 32))
        ids = chat.prompt_ids(prompt)
        before, after = [5, placeholder, placeholder, 7], [placeholder, 8]
        images = tuple(span.shift(len(before)) for span in chat.find_spans(ids, prompt))
        requests = [
            EngineRequest([*before, *ids, *after], SamplingParams(5, ignore_eos=True), 0, images=images),
            EngineRequest([*before, *after], SamplingParams(5, ignore_eos=True), 1),
        ]
        for request, result in zip(requests, await engine.generate(requests), strict=True):
            assert_agrees(image_kit, request, result)

    async def test_cancelled_requests_do_not_change_others(self, image_kit: EngineKit) -> None:
        engine, chat = image_kit.new(), ChatEncoder(image_kit.tokenizer)
        requests = []
        for seed in range(12):  # four different images
            prompt = ask(picture(20 + seed % 4), "What is it?")
            ids = chat.prompt_ids(prompt)
            images = tuple(chat.find_spans(ids, prompt))
            requests.append(EngineRequest(ids, SamplingParams(30, ignore_eos=True), seed, images=images))
        for version in (1, 2):
            tasks = [start(engine, request, "generate") for request in requests]
            for i, task in enumerate(tasks):
                if i % 3:
                    await asyncio.sleep(0.01 * i)  # before, while and after it is processed
                    task.cancel()
            for i, (request, task) in enumerate(zip(requests, tasks, strict=True)):
                if i % 3:
                    with suppress(asyncio.CancelledError):  # or it had ended
                        await task
                else:
                    assert_agrees(image_kit, request, await task)
            image_kit.add_noise(scale=0.05, seed=version)
            await image_kit.sync(engine, version)
        for request, result in zip(requests, await engine.generate(requests), strict=True):
            assert_agrees(image_kit, request, result)
