import asyncio
import copy
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit import engine_contract as contract
from train_kit.engines import LIMITS, EngineKit, Listener, assert_same, make_engine
from train_kit.weight_sync import TensorSource
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import EngineError, EngineLostError, SyncError
from skyrl_train.inference_engines import client as client_module
from skyrl_train.inference_engines import remote
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, InferenceEngine, SamplingParams
from skyrl_train.inference_engines.client import EngineClient
from skyrl_train.inference_engines.hf import PackedEngine
from skyrl_train.inference_engines.process import ServerProcess
from skyrl_train.weight_sync import Receipt, SyncOptions, SyncPlan, WeightSync, rendezvous

SYNC_TIMEOUT_S = 90.0


@pytest.fixture(scope="module")
def processes(forked_processes: None) -> Iterator[list[ServerProcess]]:
    """Two engine processes shared by all tests. Each connection creates a new engine."""
    started = [ServerProcess(n_threads=1) for _ in range(2)]
    yield started
    for process in started:
        process.close()


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the sender of a failed sync wait for receivers for 1 s instead of 10 s."""
    monkeypatch.setattr(rendezvous, "LINGER_S", 1.0)


@pytest.fixture
async def engine_kit(
    processes: list[ServerProcess],
    tiny_model_path: Path,
    tiny_model: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> AsyncIterator[EngineKit]:
    """Two engines in separate processes, each with its own copy of the policy."""
    clients: list[EngineClient] = []

    def new(**options: Any) -> EngineClient:
        make = make_engine(tiny_model_path, **options)
        clients.append(EngineClient([process.connect(make) for process in processes]))
        return clients[-1]

    model = copy.deepcopy(tiny_model)
    yield EngineKit(new, model, tiny_tokenizer, tolerance=1e-5, cache_block_size=1, transport="auto")
    for client in clients:
        await client.close()


class TestClientContract(
    contract.CallContract, contract.CacheContract, contract.WeightContract, contract.ControlContract
):
    """The parts of the engine contract that routing to two engines could break."""

    async def test_an_abort_ends_all_requests_including_waiting_and_paused_ones(self, engine_kit: EngineKit) -> None:
        engine = engine_kit.new(max_num_seqs=1)  # on each engine, one request runs and one waits
        listeners = [Listener(engine, engine_kit.request(n, **contract.LONG)) for n in (10, 11, 12, 13)]
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


# -- lost engines


class Fleet:
    """A client of two engines that are replaced when lost. Tests kill the process of the first one."""

    def __init__(self, path: Path, folder: Path, model: PreTrainedModel) -> None:
        self.model = model
        self.pids: list[int] = []  # of the first engine and its replacements
        self._path, self._folder = path, folder

    async def start(self, index: int) -> InferenceEngine:
        """Start an engine in a new process."""
        file = self._folder / f"{len(self.pids)}.pid"
        process = await asyncio.to_thread(ServerProcess, n_threads=1)
        make = make_engine(self._path, file)
        engine = await asyncio.to_thread(process.connect, make, is_owner=True)
        self.pids.append(int(file.read_text()))
        return engine

    async def connect(self, survivor: ServerProcess, *, sends_changes: bool) -> None:
        """Start the engines. The second one runs in the process `survivor`, which tests share."""
        second = await asyncio.to_thread(survivor.connect, make_engine(self._path))
        self.client = EngineClient([await self.start(0), second], self.start)
        options = SyncOptions("auto", timeout_s=SYNC_TIMEOUT_S, sends_changes=sends_changes)
        self.sync = WeightSync(TensorSource(self.model.named_parameters), {"the engines": self.client}, options)
        self.client.follow(self.sync)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pids[-1], how)

    async def generate(self) -> list[EngineResult]:
        """Sample 3 tokens on each engine, twice."""
        return await self.client.generate([request(3, seed) for seed in range(4)])


@pytest.fixture
async def fleet(
    request: pytest.FixtureRequest,
    processes: list[ServerProcess],
    tiny_model_path: Path,
    tmp_path: Path,
    tiny_model: PreTrainedModel,
) -> AsyncIterator[Fleet]:
    """Two engines with weights of version 1 that differ from the model's folder."""
    model = copy.deepcopy(tiny_model)
    model.lm_head.weight.detach().mul_(1.5)
    fleet = Fleet(tiny_model_path, tmp_path, model)
    await fleet.connect(processes[1], sends_changes=getattr(request, "param", False))
    fleet.first_sync = (await fleet.sync(1)).numbers()
    yield fleet
    await fleet.client.close()


def versions(results: list[EngineResult]) -> set[tuple[Any, ...]]:
    return {result.weight_spans for result in results}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_engine_is_replaced_and_its_requests_get_the_same_tokens(
    fleet: Fleet, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HEALTH_INTERVAL_S", 0.2)
    monkeypatch.setattr(client_module, "HEALTH_TIMEOUT_S", 5.0)
    monkeypatch.setattr(remote, "CLOSE_TIMEOUT_S", 0.5)
    requests = [request(100, seed, f"s{seed}") for seed in range(4)]
    expected = await fleet.client.generate(requests)
    listeners = [Listener(fleet.client, r) for r in requests]
    generating = asyncio.create_task(fleet.client.generate(requests))
    for listener in listeners:
        await listener.wait_for(20)
    fleet.kill(how)
    for listener, result in zip(listeners, expected, strict=True):
        assert_same(await listener.result(), result, 1e-5)
        assert listener.token_ids == result.token_ids
    for found, result in zip(await generating, expected, strict=True):
        assert_same(found, result, 1e-5)
        assert found.weight_spans == ((1, 100),)
    assert len(fleet.pids) == 2


async def test_an_engine_that_hangs_does_not_delay_the_health_checks_of_others(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HEALTH_INTERVAL_S", 0.05)
    both, checked = asyncio.Barrier(2), asyncio.Event()

    class Meeting(PackedEngine):
        async def check_health(self) -> None:
            await both.wait()
            checked.set()

    async def restart(index: int) -> InferenceEngine:
        raise EngineError("none was lost")

    client = EngineClient([Meeting(tiny_model, tiny_tokenizer, **LIMITS) for _ in range(2)], restart)
    await client.generate([request(1)])
    async with asyncio.timeout(client_module.HEALTH_TIMEOUT_S / 2):
        await checked.wait()
    await client.close()


async def test_an_engine_lost_before_a_sync_is_replaced_and_receives_it(fleet: Fleet) -> None:
    fleet.kill()
    async with asyncio.timeout(SYNC_TIMEOUT_S):  # otherwise the second engine waits for the failed sync
        metrics = (await fleet.sync(2)).numbers()
    assert metrics["sync/verified_copies"] == 2
    assert versions(await fleet.generate()) == {((2, 3),)}
    assert len(fleet.pids) == 2


@pytest.mark.parametrize("fleet", [True], indirect=True, ids=["sends changes"])
async def test_after_a_replacement_during_an_update_the_next_sync_sends_all_weights(fleet: Fleet) -> None:
    head, whole = fleet.model.lm_head.weight.detach(), fleet.first_sync
    head[0] += 1
    changes = (await fleet.sync(2)).numbers()
    assert changes["sync/megabytes"] < 0.1 * whole["sync/megabytes"]
    head[1] += 1  # the first mini-batch of an update
    fleet.kill()
    await fleet.generate()
    assert len(fleet.pids) == 2
    head[2] += 1
    assert (await fleet.sync(3)).numbers() == whole | {"sync/megabytes": pytest.approx(whole["sync/megabytes"])}
    head[3] += 1
    assert (await fleet.sync(4)).numbers() == changes


async def test_an_engine_started_during_an_update_generates_after_the_next_sync(fleet: Fleet) -> None:
    is_current = False
    fleet.client.follow(fleet.sync, lambda: is_current)
    fleet.kill()
    generating = asyncio.create_task(fleet.generate())
    while len(fleet.pids) < 2 or not fleet.client._held:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert not generating.done()
    await fleet.client.pause()
    await fleet.sync(2)
    is_current = True
    await fleet.client.resume()
    assert [result.weight_spans for result in await generating] == [((2, 3),), ((1, 3),)] * 2
    assert versions(await fleet.generate()) == {((2, 3),)}


async def test_an_engine_lost_before_a_pause_is_replaced_by_a_paused_one(fleet: Fleet) -> None:
    fleet.kill()
    await fleet.client.pause()
    await fleet.client.end_session("unknown")
    generating = asyncio.create_task(fleet.generate())
    while len(fleet.pids) < 2:
        await asyncio.sleep(0.01)
    await fleet.sync(2)
    assert not generating.done()
    await fleet.client.resume()
    assert versions(await generating) == {((2, 3),)}


@pytest.mark.parametrize("is_asleep", [True, False], ids=["lost while asleep", "lost before"])
async def test_engines_sleep_while_a_lost_one_is_replaced(
    fleet: Fleet, is_asleep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next sync replaces an engine lost while asleep. Until then, models use its memory."""
    monkeypatch.setattr(client_module, "HEALTH_INTERVAL_S", 0.05)
    await fleet.client.generate([request(3)])  # starts the checks of its health
    if is_asleep:
        await fleet.client.sleep()
        fleet.kill()
        await asyncio.sleep(0.5)
        assert len(fleet.pids) == 1
        await fleet.client.wake_up("weights")
        assert (await fleet.sync(2)).numbers()["sync/verified_copies"] == 2
    else:
        fleet.kill()
        while not fleet.client._replacing[0].locked():
            await asyncio.sleep(0.01)
        await fleet.client.sleep()
    assert len(fleet.pids) == 2
    for engine in fleet.client._engines:
        with pytest.raises(EngineError, match="asleep"):
            await engine.generate([request(3)])
    await fleet.client.wake_up()
    assert versions(await fleet.generate()) == {((2 if is_asleep else 1, 3),)}


async def test_an_engine_that_is_lost_repeatedly_fails_its_requests(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_REPLACEMENTS", 1)
    for is_last in (False, True):
        listener = Listener(fleet.client, request(100))
        await listener.wait_for(5)
        fleet.kill()
        if not is_last:
            assert len((await listener.result()).token_ids) == 100
    with pytest.raises(EngineLostError, match="engine 1 of 2 was lost 2 times; the last time: engine process"):
        await listener.result()


async def test_requests_of_a_lost_engine_fail_until_a_replacement_succeeds(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = await fleet.client.generate([request(30, 0, "a")])

    async def fail(_: int) -> InferenceEngine:
        raise EngineError("its node has left the cluster")

    fleet.kill()
    with monkeypatch.context() as patches:
        patches.setattr(fleet.client, "_restart", None)
        with pytest.raises(EngineError, match="ended with exit status -9"):
            await fleet.client.generate([request(30, 0, "a")])
        patches.setattr(fleet.client, "_restart", fail)
        with pytest.raises(EngineError, match="its node has left the cluster"):
            await fleet.client.generate([request(30, 0, "a")])
        await fleet.client.pause()  # ignores the engine that is gone
        await fleet.client.resume()
    (found,) = await fleet.client.generate([request(30, 0, "a")])
    assert_same(found, expected, 1e-5)


async def test_a_replacement_with_another_weight_dtype_is_rejected(fleet: Fleet) -> None:
    fleet.client.info = replace(fleet.client.info, weight_dtype=torch.bfloat16)
    fleet.kill()
    with pytest.raises(EngineError, match="replacement of engine 1 of 2 holds weights in None instead of bfloat16"):
        await fleet.client.generate([request(30, 0, "a")])


async def test_engines_must_hold_equal_dtypes_and_read_images_if_all_do(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    engines = [PackedEngine(tiny_model, tiny_tokenizer, **LIMITS) for _ in range(2)]
    for engine, dtype in zip(engines, (torch.float32, torch.bfloat16), strict=True):
        engine.info = replace(engine.info, weight_dtype=dtype)  # as servers of vLLM have it
    with pytest.raises(EngineError, match="engines hold weights in different types: float32, bfloat16; start all"):
        EngineClient(engines)
    for n_reading in (1, 2):  # a request may go to either
        for i, engine in enumerate(engines):
            engine.info = replace(engine.info, weight_dtype=None, reads_images=i < n_reading)
        assert EngineClient(engines).info.reads_images == (n_reading == 2)
    for engine in engines:
        await engine.close()


async def test_an_aborted_request_of_a_lost_engine_is_not_sampled_again(fleet: Fleet) -> None:
    aborted, kept = Listener(fleet.client, request(400, 0, "a")), Listener(fleet.client, request(100, 1, "b"))
    third = asyncio.create_task(fleet.client.generate([request(400, 2, "a"), request(30, 3, "a")]))
    await aborted.wait_for(5)
    fleet.kill(signal.SIGSTOP)  # it does not learn of the abort
    aborting = asyncio.create_task(fleet.client.abort("a"))
    await asyncio.sleep(0.1)
    fleet.kill()
    await aborting
    assert (await aborted.result()).stop_reason == "abort"
    assert {result.stop_reason for result in await third} == {"abort"}
    assert (await kept.result()).stop_reason == "length"


# -- receipts


class Damaged(PackedEngine):
    """An engine whose weights differ from the sent ones."""

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        receipt = await super().receive_weights(plan)
        return receipt._replace(checksum=receipt.checksum + 1)


@pytest.mark.parametrize("damaged", [[], [0], [1], [0, 1]], ids=str)
async def test_any_engine_with_wrong_weights_fails_the_sync(
    damaged: list[int], tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    kinds = [Damaged if i in damaged else PackedEngine for i in range(2)]
    model = copy.deepcopy(tiny_model)
    engines = [kind(copy.deepcopy(model), tiny_tokenizer, owns_model=True, **LIMITS) for kind in kinds]
    client = EngineClient(engines)
    sync = WeightSync(TensorSource(model.named_parameters), {"engine": client}, SyncOptions("auto", timeout_s=60))
    if damaged:
        with pytest.raises(SyncError, match=r"received different weights|holds other weights than the policy"):
            await sync(1)
    else:
        assert (await sync(1)).numbers()["sync/verified_copies"] == 2
    await client.close()
