"""Limits of the engine: memory, failures, cancellation and close affect only the callers concerned."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from train_kit.engines import assert_same
from train_kit.models import SMALL
from train_kit.weight_sync import sync_weights
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Lfm2Config,
    PreTrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
)

from skyrl_train.errors import EngineError, OutOfMemoryError
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, SamplingParams
from skyrl_train.inference_engines.hf import PackedEngine
from skyrl_train.inference_engines.hf.kv_memory import KVMemory

NewEngine = Callable[..., PackedEngine]
Passes = list[int]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]

TOKEN_BYTES = 2 * 2 * 4 * 16 * 4  # keys and values, layers, heads, head_dim, float32
REGION_BYTES = 64 * TOKEN_BYTES  # region of a sequence of up to 64 tokens


def request(n_prompt: int, n_new: int, session: str | None = None, token: int = 5) -> EngineRequest:
    return EngineRequest([token] * n_prompt, SamplingParams(max_new_tokens=n_new), token, session)


@pytest.fixture
def cache_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the key-value cache after each access to a layer."""
    sizes: list[int] = []
    layer = KVMemory.layer

    def measuring_layer(self: KVMemory, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        memory = layer(self, *args)
        sizes.append(sum(tensor.nbytes for pair in self._layers.values() for tensor in pair))
        return memory

    monkeypatch.setattr(KVMemory, "layer", measuring_layer)
    return sizes


@pytest.fixture
def gate(tiny_model: PreTrainedModel) -> Iterator[threading.Event]:
    """An event, initially set, that forward passes wait for."""
    opened = threading.Event()
    opened.set()
    hook = tiny_model.base_model.register_forward_pre_hook(lambda *_: opened.wait(60) and None)
    yield opened
    opened.set()
    hook.remove()


# -- memory


async def test_idle_sessions_make_room_for_others(new_engine: NewEngine, forward_passes: Passes) -> None:
    engine = new_engine(max_cache_bytes=3 * REGION_BYTES)
    for name in "abcd":
        await engine.generate([request(20, 4, session=name, token=ord(name))])
    forward_passes.clear()
    await engine.generate([request(20, 4, session="d", token=ord("d"))])
    await engine.generate([request(20, 4, session="c", token=ord("c"))])
    assert set(forward_passes) == {1}
    await engine.generate([request(20, 4, session="a", token=ord("a"))])  # least recently used when d arrived
    assert [n_tokens for n_tokens in forward_passes if n_tokens > 1] == [20]


async def test_simultaneous_requests_of_a_session_free_their_memory(new_engine: NewEngine) -> None:
    engine = new_engine(max_cache_bytes=3 * REGION_BYTES)
    requests = [request(12, 4, session="game", token=token) for token in (7, 8, 9)]
    (expected,) = await new_engine().generate(requests[2:])
    for _ in range(5):
        assert_same((await engine.generate(requests))[2], expected, 5e-6)


async def test_the_cache_uses_at_most_max_cache_bytes(
    new_engine: NewEngine, other_model: PreTrainedModel, cache_sizes: list[int]
) -> None:
    await new_engine(other_model, max_cache_bytes=1_000_000).generate([request(10, 4)])
    assert 900_000 < max(cache_sizes) <= 1_000_000
    config = other_model.config
    n_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    n_min_bytes = 64 * 2 * 2 * n_heads * 8 * 4  # tokens, keys and values, layers, heads, head_dim, float32
    await new_engine(other_model, max_cache_bytes=n_min_bytes).generate([request(10, 4)])
    with pytest.raises(EngineError, match=f"{n_min_bytes - 1:,} are available"):
        await new_engine(other_model, max_cache_bytes=n_min_bytes - 1).generate([request(10, 4)])


async def test_a_growing_sequence_preempts_the_last_arrival(new_engine: NewEngine, forward_passes: Passes) -> None:
    requests = [request(40, 100), request(45, 100, token=9)]
    expected = [await new_engine().generate([r]) for r in requests]
    forward_passes.clear()
    results = await new_engine(max_cache_bytes=4 * REGION_BYTES).generate(requests)
    assert sum(forward_passes) > 40 + 45 + 2 * 99  # a preempted sequence was read twice
    for result, (single,) in zip(results, expected, strict=True):
        assert_same(result, single, 5e-6)


async def test_a_session_of_varying_prompt_lengths(new_engine: NewEngine) -> None:
    engine, unlimited = new_engine(max_cache_bytes=6 * REGION_BYTES), new_engine()
    for n_prompt in (10, 60, 61, 120, 200, 300, 40):
        r = request(n_prompt, 5, session="grows")
        (result,), (expected,) = await engine.generate([r]), await unlimited.generate([r])
        assert_same(result, expected, 5e-6)


async def test_only_the_call_of_a_sequence_that_can_never_fit_is_refused(new_engine: NewEngine) -> None:
    engine = new_engine(max_cache_bytes=2 * REGION_BYTES)
    served = asyncio.create_task(engine.generate([request(20, 20)]))
    message = rf"a sequence of 129 tokens needs {129 * TOKEN_BYTES:,} bytes .* {2 * REGION_BYTES:,} are available"
    with pytest.raises(EngineError, match=message):
        await engine.generate([request(10, 5), request(100, 29)])
    (result,) = await served
    assert len(result.token_ids) == 20
    (largest,) = await engine.generate([request(100, 28)])
    assert len(largest.token_ids) == 28


# -- failures


async def test_a_failing_pass_fails_every_caller_and_the_engine_recovers(
    new_engine: NewEngine, tiny_model: PreTrainedModel, forward_passes: Passes, caplog: pytest.LogCaptureFixture
) -> None:
    engine = new_engine(max_num_seqs=2)
    requests = [request(10, 8, session="a"), request(11, 8), request(12, 8)]
    expected = [await engine.generate([r]) for r in requests]
    forward_passes.clear()

    def fail(*_: Any) -> None:
        if len(forward_passes) > 3:
            raise ValueError("out of luck")

    hook = tiny_model.base_model.register_forward_pre_hook(fail)
    outcomes = await asyncio.gather(*(engine.generate([r]) for r in requests), return_exceptions=True)
    hook.remove()
    assert [type(outcome) for outcome in outcomes] == [EngineError] * 3
    assert {str(outcome) for outcome in outcomes} == {"generation failed: ValueError('out of luck')"}
    assert "ValueError: out of luck" in caplog.text  # with traceback
    for r, (result,) in zip(requests, expected, strict=True):
        assert (await engine.generate([r]))[0].token_ids == result.token_ids


async def test_a_cache_that_cannot_be_allocated_is_halved(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [request(n, 8) for n in (10, 100, 200)]
    expected = await new_engine().generate(requests)
    engine, zeros = new_engine(max_cache_bytes=64 * REGION_BYTES), KVMemory._zeros

    def allocate(memory: KVMemory, like: torch.Tensor) -> torch.Tensor:
        if memory.size > 20 * 64:
            raise MemoryError
        return zeros(memory, like)

    monkeypatch.setattr(KVMemory, "_zeros", allocate)
    results = await engine.generate(requests)
    assert "It is repeated with a key-value cache of 1,024 tokens" in caplog.text
    assert "max_num_seqs" not in caplog.text
    for result, first in zip(results, expected, strict=True):
        assert_same(result, first, 5e-6)
    small = new_engine(max_cache_bytes=9 * REGION_BYTES)  # half of it would be too small for the longest sequence
    monkeypatch.setattr(KVMemory, "_zeros", lambda *_: allocate(KVMemory(10**9), torch.empty(0)))
    with pytest.raises(OutOfMemoryError, match="One sequence alone does not fit"):
        await small.generate(requests)


# -- cancellation, weight sync, close


async def start_step(
    engine: PackedEngine, gate: threading.Event, step_request: EngineRequest | None = None
) -> asyncio.Task[list[EngineResult]]:
    """Start a call whose first step does not end before `gate` is set."""
    gate.clear()
    call = asyncio.create_task(engine.generate([step_request or request(10, 400)]))
    async with asyncio.timeout(60):
        while engine._between_steps.is_set():
            await asyncio.sleep(0.001)
    return call


async def test_requests_that_finished_before_a_step_fails_return_their_tokens(
    new_engine: NewEngine, tiny_model: PreTrainedModel, gate: threading.Event
) -> None:
    engine = new_engine()

    def fail(*_: Any) -> None:
        raise ValueError("out of luck")

    hook = tiny_model.base_model.register_forward_pre_hook(fail)
    call = await start_step(engine, gate)
    late = asyncio.create_task(engine.generate([request(11, 8)]))
    await engine.abort()
    await asyncio.sleep(0.01)
    gate.set()
    async with asyncio.timeout(10):
        (result,) = await call
    hook.remove()
    assert (result.token_ids, result.stop_reason) == ([], "abort")
    with pytest.raises(EngineError, match="out of luck"):
        await late


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_weight_sync_waits_for_the_step_of_a_cancelled_call_and_later_calls_wait_for_the_sync(
    new_engine: NewEngine, tiny_model: PreTrainedModel, gate: threading.Event, eventually: Eventually
) -> None:
    engine = new_engine()
    await cancel(await start_step(engine, gate))
    sync = asyncio.create_task(sync_weights(engine, tiny_model.named_parameters, 1))
    await eventually(lambda: engine._n_holds == 1)
    late = asyncio.create_task(engine.generate([request(12, 4)]))
    await asyncio.sleep(0.01)
    assert not sync.done()
    gate.set()
    (result,) = await late
    assert sync.done()
    assert result.weight_spans == ((1, 4),)


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_a_cancelled_pause_has_no_effect(new_engine: NewEngine, gate: threading.Event, is_resumed: bool) -> None:
    engine = new_engine()
    call = await start_step(engine, gate, request(10, 4))
    pause = asyncio.create_task(engine.pause())
    await asyncio.sleep(0.01)
    if is_resumed:
        await engine.resume()
    await cancel(pause)
    gate.set()
    async with asyncio.timeout(60):
        assert len((await call)[0].token_ids) == 4
    with pytest.raises(EngineError, match="not paused"):
        await engine.resume()


async def test_a_pause_of_a_resumed_engine_returns_after_the_step(new_engine: NewEngine, gate: threading.Event) -> None:
    engine = new_engine()
    call = await start_step(engine, gate)
    pause = asyncio.create_task(engine.pause())
    await asyncio.sleep(0.01)
    await engine.resume()
    gate.set()
    await pause
    assert not call.done()
    await engine.abort()
    await call


async def test_a_cancelled_close_continues(new_engine: NewEngine, gate: threading.Event) -> None:
    threads = set(threading.enumerate())
    engine = new_engine()
    call = await start_step(engine, gate)
    close = asyncio.create_task(engine.close())
    await asyncio.sleep(0.01)
    await cancel(close)
    with pytest.raises(EngineError, match="closed while requests were waiting"):
        await call
    gate.set()
    await engine.close()
    assert set(threading.enumerate()) <= threads
    assert not list(engine._queue)
    with pytest.raises(EngineError, match="the engine is closed"):
        await engine.pause()


async def test_a_session_ended_during_a_step_keeps_no_cache(new_engine: NewEngine, gate: threading.Event) -> None:
    engine = new_engine()
    await cancel(await start_step(engine, gate, request(80, 400, session="game")))
    await engine.end_session("game")
    gate.set()
    (result,) = await engine.generate([request(80, 1, session="other")])
    assert result.n_reused == 0


async def test_an_engine_that_cannot_recover_says_why(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()

    def broken(*_: Any) -> None:
        raise ValueError("out of order")

    monkeypatch.setattr(engine._memory, "copy", broken)
    monkeypatch.setattr(engine._memory, "release", broken)
    for _ in range(2):
        with pytest.raises(EngineError, match="out of order"):
            await asyncio.wait_for(engine.generate([request(10, 4)]), 60)
    monkeypatch.undo()


@pytest.mark.parametrize(
    "config",
    [
        RecurrentGemmaConfig(**SMALL, lru_width=32, attention_window_size=16),
        Gemma2Config(**SMALL, attn_logit_softcapping=2.0),
        Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
    ],
    ids=["recurrent layers", "capped scores", "convolutions"],
)
def test_a_model_that_mixes_packed_sequences_is_not_packed(new_engine: NewEngine, config: PreTrainedConfig) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(EngineError, match=rf"a {type(model).__name__} cannot be packed: "):
        new_engine(model)
