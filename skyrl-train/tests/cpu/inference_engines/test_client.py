"""Several engines behind one interface: the engine contract, routing, and engines that are lost."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.engine_contract import LONG, EngineContract
from train_kit.engines import EngineKit, Listener, assert_same
from train_kit.weight_sync import TensorSource
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import EngineError, EngineLostError
from skyrl_train.inference_engines import client as client_module
from skyrl_train.inference_engines import remote
from skyrl_train.inference_engines.base import EngineRequest, InferenceEngine, SamplingParams
from skyrl_train.inference_engines.client import EngineClient
from skyrl_train.inference_engines.hf import HFEngine, load_engine
from skyrl_train.inference_engines.process import ServerProcess
from skyrl_train.weight_sync import SyncOptions, WeightSync, rendezvous


@pytest.fixture(scope="module")
def processes() -> Iterator[list[ServerProcess]]:
    """Two engine processes shared by the tests of the contract; each connection has its own engine."""
    started = [ServerProcess(n_threads=1) for _ in range(2)]
    yield started
    for process in started:
        process.close()


def make_engine(path: Path, **options: Any) -> Callable[[], InferenceEngine]:
    defaults = {"max_num_seqs": 32, "max_num_batched_tokens": 1024, "max_cache_bytes": 1 << 28}
    return partial(load_engine, str(path), dtype=torch.float32, **{**defaults, **options})


@pytest.fixture
async def engine_kit(
    processes: list[ServerProcess],
    tiny_model_path: Path,
    tiny_model: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> AsyncIterator[EngineKit]:
    """Two engines in processes of their own, each with its own copy of the policy."""
    clients: list[EngineClient] = []

    def new(**options: Any) -> EngineClient:
        make = make_engine(tiny_model_path, **options)
        clients.append(EngineClient([process.connect(make) for process in processes]))
        return clients[-1]

    model = copy.deepcopy(tiny_model)
    yield EngineKit(new, model, tiny_tokenizer, tolerance=1e-5, cache_block_size=1, transport="auto")
    for client in clients:
        await client.close()


class TestClientContract(EngineContract):
    """The engine contract over two engines."""

    async def test_an_abort_ends_all_requests_including_waiting_and_paused_ones(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new(max_num_seqs=1)  # on each engine, one request runs and one waits
        listeners = [Listener(engine, engine_kit.request(n, **LONG)) for n in (10, 11, 12, 13)]
        for listener in listeners[:2]:
            await listener.wait_for(5)
        await engine.pause()
        n_before = [await listener.settle() for listener in listeners]
        await engine.abort()
        results = [await listener.result() for listener in listeners]
        assert {result.stop_reason for result in results} == {"abort"}
        assert [len(result.token_ids) for result in results] == n_before
        assert n_before[2:] == [0, 0]
        await engine.resume()
        assert len((await engine.generate([engine_kit.request(10, 4, ignore_eos=True)]))[0].token_ids) == 4


SYNC_TIMEOUT_S = 90.0


def request(n_new: int, seed: int = 0, session: str | None = None) -> EngineRequest:
    return EngineRequest(list(range(5, 25)), SamplingParams(n_new, ignore_eos=True), seed, session)


async def test_sessions_are_spread_and_stay_on_their_engine(engine_kit: EngineKit) -> None:
    engine = engine_kit.new()
    sessions = [f"s{i}" for i in range(6)]
    await engine.generate([request(2, seed, session) for seed, session in enumerate(sessions)])
    homes = dict(engine._homes)
    assert sorted(homes.values()) == [0, 0, 0, 1, 1, 1]
    await engine.generate([request(2, seed, session) for seed, session in enumerate(reversed(sessions))])
    assert engine._homes == homes
    for session in sessions:
        await engine.end_session(session)
    assert not engine._homes


@asynccontextmanager
async def replaceable(
    survivor: ServerProcess, path: Path, model: PreTrainedModel, *, sends_changes: bool = False
) -> AsyncIterator[tuple[EngineClient, list[int], WeightSync]]:
    """Yield a client of two engines that are replaced when lost, their process ids, and their weight sync.

    The tests kill the process of the first engine; the second one is in a process that they share.
    """
    pids: list[int] = []

    async def start(index: int) -> InferenceEngine:
        process = await asyncio.to_thread(ServerProcess, n_threads=1)
        pids.append(process.pid)
        return await asyncio.to_thread(process.connect, make_engine(path), is_owner=True)

    first, second = await start(0), await asyncio.to_thread(survivor.connect, make_engine(path))
    pids.append(survivor.pid)
    client = EngineClient([first, second], start)
    source = TensorSource(model.named_parameters)
    options = SyncOptions("auto", timeout_s=SYNC_TIMEOUT_S, sends_changes=sends_changes)
    sync = WeightSync(source, {"the engines": client}, options)
    client.follow(sync)
    try:
        yield client, pids, sync
    finally:
        await client.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_engine_is_replaced_and_its_requests_get_the_same_tokens(
    processes: list[ServerProcess],
    tiny_model_path: Path,
    tiny_model: PreTrainedModel,
    how: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "HEALTH_INTERVAL_S", 0.2)
    monkeypatch.setattr(client_module, "HEALTH_TIMEOUT_S", 5.0)
    monkeypatch.setattr(remote, "CLOSE_TIMEOUT_S", 0.5)
    model = copy.deepcopy(tiny_model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)  # the weights of the folder are not the current ones
    async with replaceable(processes[1], tiny_model_path, model) as (client, pids, sync):
        await sync(4)
        requests = [request(300, seed, f"s{seed}") for seed in range(4)]
        expected = await client.generate(requests)
        assert {span.version for result in expected for span in result.weight_spans} == {4}
        listeners = [Listener(client, r) for r in requests]
        generating = asyncio.create_task(client.generate(requests))
        for listener in listeners:
            await listener.wait_for(20)
        os.kill(pids[0], how)
        for listener, result in zip(listeners, expected, strict=True):
            assert_same(await listener.result(), result, 1e-5)
            assert listener.token_ids == result.token_ids
        for found, result in zip(await generating, expected, strict=True):
            assert_same(found, result, 1e-5)
            assert found.weight_spans == ((4, 300),)
        assert len(pids) == 3


async def test_an_engine_that_hangs_does_not_delay_the_health_checks_of_others(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HEALTH_INTERVAL_S", 0.05)
    both, checked = asyncio.Barrier(2), asyncio.Event()

    class Meeting(HFEngine):
        async def check_health(self) -> None:
            await both.wait()
            checked.set()

    async def restart(index: int) -> InferenceEngine:
        raise EngineError("none was lost")

    limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_cache_bytes": 1 << 20}
    client = EngineClient([Meeting(tiny_model, tiny_tokenizer, **limits) for _ in range(2)], restart)
    await client.generate([request(1)])
    async with asyncio.timeout(client_module.HEALTH_TIMEOUT_S / 2):
        await checked.wait()
    await client.close()


async def test_an_engine_lost_before_a_sync_is_replaced_and_receives_it(
    processes: list[ServerProcess], tiny_model_path: Path, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LINGER_S", 3.0)
    async with replaceable(processes[1], tiny_model_path, copy.deepcopy(tiny_model)) as (client, pids, sync):
        await sync(1)
        os.kill(pids[0], signal.SIGKILL)
        started = time.monotonic()
        metrics = (await sync(2)).numbers()
        assert time.monotonic() - started < SYNC_TIMEOUT_S, "the other engine waited for the failed sync"
        assert metrics["sync/verified_copies"] == 2
        results = await client.generate([request(3, seed) for seed in range(4)])
        assert {result.weight_spans for result in results} == {((2, 3),)}
        assert len(pids) == 3


async def test_after_a_replacement_during_an_update_the_next_sync_sends_all_weights(
    processes: list[ServerProcess], tiny_model_path: Path, tiny_model: PreTrainedModel
) -> None:
    model = copy.deepcopy(tiny_model)
    head = model.lm_head.weight.detach()
    async with replaceable(processes[1], tiny_model_path, model, sends_changes=True) as (client, pids, sync):
        whole = (await sync(1)).numbers()
        head[0] += 1
        changes = (await sync(2)).numbers()
        assert changes["sync/megabytes"] < 0.1 * whole["sync/megabytes"]
        head[1] += 1  # the first mini-batch of an update
        os.kill(pids[0], signal.SIGKILL)
        await client.generate([request(3, seed) for seed in range(4)])
        assert len(pids) == 3
        head[2] += 1
        assert (await sync(3)).numbers() == whole | {"sync/megabytes": pytest.approx(whole["sync/megabytes"])}
        head[3] += 1
        assert (await sync(4)).numbers() == changes


async def test_an_engine_started_during_an_update_generates_after_the_next_sync(
    processes: list[ServerProcess], tiny_model_path: Path, tiny_model: PreTrainedModel
) -> None:
    async with replaceable(processes[1], tiny_model_path, copy.deepcopy(tiny_model)) as (client, pids, sync):
        is_current = True
        client.follow(sync, lambda: is_current)
        await sync(1)
        is_current = False
        os.kill(pids[0], signal.SIGKILL)
        generating = asyncio.create_task(client.generate([request(3, seed) for seed in range(4)]))
        while len(pids) < 3 or not client._held:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert not generating.done()
        await client.pause()
        await sync(2)
        is_current = True
        await client.resume()
        assert [result.weight_spans for result in await generating] == [((2, 3),), ((1, 3),)] * 2
        results = await client.generate([request(3, seed) for seed in range(4)])
        assert {result.weight_spans for result in results} == {((2, 3),)}


async def test_an_engine_lost_before_a_pause_is_replaced_by_a_paused_one(
    processes: list[ServerProcess], tiny_model_path: Path, tiny_model: PreTrainedModel
) -> None:
    async with replaceable(processes[1], tiny_model_path, copy.deepcopy(tiny_model)) as (client, pids, sync):
        await sync(1)
        os.kill(pids[0], signal.SIGKILL)
        await client.pause()
        await client.end_session("unknown")
        generating = asyncio.create_task(client.generate([request(3, seed) for seed in range(4)]))
        while len(pids) < 3:
            await asyncio.sleep(0.05)
        await sync(2)
        assert not generating.done()
        await client.resume()
        assert {result.weight_spans for result in await generating} == {((2, 3),)}


async def test_an_engine_lost_while_asleep_is_replaced_by_the_next_sync(
    processes: list[ServerProcess], tiny_model_path: Path, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HEALTH_INTERVAL_S", 0.1)
    monkeypatch.setattr(rendezvous, "LINGER_S", 3.0)
    async with replaceable(processes[1], tiny_model_path, copy.deepcopy(tiny_model)) as (client, pids, sync):
        await sync(1)
        await client.generate([request(3)])  # starts the checks of its health
        await client.sleep()
        os.kill(pids[0], signal.SIGKILL)
        await asyncio.sleep(1)
        assert len(pids) == 2, "others use its memory"
        await client.wake_up("weights")
        assert (await sync(2)).numbers()["sync/verified_copies"] == 2
        assert len(pids) == 3
        for engine in client._engines:
            with pytest.raises(EngineError, match="asleep"):
                await engine.generate([request(3)])
        await client.wake_up()
        results = await client.generate([request(3, seed) for seed in range(4)])
        assert {result.weight_spans for result in results} == {((2, 3),)}


async def test_engines_sleep_once_a_lost_one_is_replaced(
    processes: list[ServerProcess], tiny_model_path: Path, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HEALTH_INTERVAL_S", 0.1)
    async with replaceable(processes[1], tiny_model_path, copy.deepcopy(tiny_model)) as (client, pids, sync):
        await sync(1)
        await client.generate([request(3)])
        os.kill(pids[0], signal.SIGKILL)
        while not client._replacing[0].locked():
            await asyncio.sleep(0.01)
        await client.sleep()
        assert len(pids) == 3
        for engine in client._engines:
            with pytest.raises(EngineError, match="asleep"):
                await engine.generate([request(3)])
        await client.wake_up()
        assert len((await client.generate([request(3)]))[0].token_ids) == 3


async def test_an_engine_that_is_lost_again_and_again_fails_its_requests(
    processes: list[ServerProcess], tiny_model_path: Path, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_REPLACEMENTS", 1)
    async with replaceable(processes[1], tiny_model_path, copy.deepcopy(tiny_model)) as (client, pids, sync):
        await sync(1)
        for _ in range(2):
            listener = Listener(client, request(400))
            await listener.wait_for(5)
            os.kill(pids[-1] if len(pids) > 2 else pids[0], signal.SIGKILL)
            if len(pids) == 2:
                assert len((await listener.result()).token_ids) == 400
        with pytest.raises(EngineLostError, match="engine 1 of 2 was lost 2 times; the last time: engine process"):
            await listener.result()


async def test_a_replacement_that_fails_is_tried_again_for_the_next_requests(
    processes: list[ServerProcess], tiny_model_path: Path, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replaceable(processes[1], tiny_model_path, copy.deepcopy(tiny_model)) as (client, pids, sync):
        await sync(1)
        (expected,) = await client.generate([request(30, 0, "a")])

        async def fail(_: int) -> InferenceEngine:
            raise EngineError("its node has left the cluster")

        os.kill(pids[0], signal.SIGKILL)
        with monkeypatch.context() as patches:
            patches.setattr(client, "_restart", fail)
            with pytest.raises(EngineError, match="its node has left the cluster"):
                await client.generate([request(30, 0, "a")])
            await client.pause()  # ignores the engine that is gone
            await client.resume()
        (found,) = await client.generate([request(30, 0, "a")])
        assert_same(found, expected, 1e-5)


async def test_a_replacement_with_weights_of_another_type_is_refused(
    processes: list[ServerProcess], tiny_model_path: Path, tiny_model: PreTrainedModel
) -> None:
    async with replaceable(processes[1], tiny_model_path, copy.deepcopy(tiny_model)) as (client, pids, _):
        client.info = replace(client.info, weight_dtype=torch.bfloat16)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(EngineError, match="replacement of engine 1 of 2 holds weights in None instead of bfloat16"):
            await client.generate([request(30, 0, "a")])


async def test_engines_with_weights_of_different_types_are_refused(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_cache_bytes": 1 << 20}
    engines = [HFEngine(tiny_model, tiny_tokenizer, **limits) for _ in range(2)]
    for engine, dtype in zip(engines, (torch.float32, torch.bfloat16), strict=True):
        engine.info = replace(engine.info, weight_dtype=dtype)  # as servers of vLLM have it
    with pytest.raises(EngineError, match="engines hold weights in different types: float32, bfloat16; start all"):
        EngineClient(engines)
    for engine in engines:
        await engine.close()


async def test_an_aborted_request_of_a_lost_engine_is_not_sampled_again(
    processes: list[ServerProcess], tiny_model_path: Path, tiny_model: PreTrainedModel
) -> None:
    async with replaceable(processes[1], tiny_model_path, copy.deepcopy(tiny_model)) as (client, pids, sync):
        await sync(1)
        aborted, kept = Listener(client, request(400, 0, "a")), Listener(client, request(400, 1, "b"))
        third = asyncio.create_task(client.generate([request(400, 2, "a"), request(30, 3, "a")]))
        await aborted.wait_for(5)
        os.kill(pids[0], signal.SIGSTOP)  # it does not learn of the abort
        aborting = asyncio.create_task(client.abort("a"))
        await asyncio.sleep(0.1)
        os.kill(pids[0], signal.SIGKILL)
        await aborting
        assert (await aborted.result()).stop_reason == "abort"
        assert {result.stop_reason for result in await third} == {"abort"}
        assert (await kept.result()).stop_reason == "length"


async def test_without_a_restart_a_lost_engine_fails_its_requests(
    tiny_model_path: Path, tiny_model: PreTrainedModel
) -> None:
    process = await asyncio.to_thread(ServerProcess, n_threads=1)
    engine = await asyncio.to_thread(process.connect, make_engine(tiny_model_path), is_owner=True)
    client = EngineClient([engine])
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="ended with exit status -9"):
        await client.generate([request(400)])
    await client.close()
