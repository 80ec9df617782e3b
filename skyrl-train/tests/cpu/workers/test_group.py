import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch
from train_kit.ranks import close, load_group, load_policy, spec
from train_kit.weight_sync import TensorCopy
from train_kit.workers import config, policy_objective
from transformers import PreTrainedModel

from skyrl_train.errors import EngineLostError, SyncError, WorkerError
from skyrl_train.launch.process import ProcessRank, RankHost
from skyrl_train.models import scoring_module
from skyrl_train.types.specs import World
from skyrl_train.weight_sync import Receipt, Receiver, SyncOptions, SyncPlan, WeightSync, rendezvous
from skyrl_train.weight_sync import stream as stream_module
from skyrl_train.weight_sync.sync import free_port
from skyrl_train.workers.worker import Worker

pytestmark = pytest.mark.usefixtures("forked_processes")

N_RANKS = 2
PLACE: ContextVar[str] = ContextVar("place")
"""The GPU of a receiver."""


def serve(connection: Connection, world: World, address: str) -> None:
    """Serve a rank whose slots are on the CPU, where only receivers in the place `GPU-<rank>` can open them."""
    stream_module.stream_device = lambda plan: torch.device("cpu")
    stream_module.memory_location = lambda device: f"GPU-{world.rank}"
    rendezvous.LINGER_S = 0.5
    RankHost(world, address, 1).serve(connection)


def serve_until_probe(connection: Connection, world: World, address: str) -> None:
    """Serve a rank; rank 1 leaves the process group and then ends while the model is probed."""

    def end(*_: object) -> None:
        for tcp in psutil.Process().net_connections("tcp"):
            if tcp.raddr:
                socket.socket(fileno=os.dup(tcp.fd)).shutdown(socket.SHUT_RDWR)
        time.sleep(1)
        os._exit(3)

    if world.rank == 1:
        scoring_module.find_sharing_fault = end  # type: ignore[assignment]
    RankHost(world, address, 1).serve(connection)


@asynccontextmanager
async def start_ranks(serve: Callable[[Connection, World, str], None]) -> AsyncIterator[list[ProcessRank]]:
    """Start ranks in processes that run `serve`."""
    context = multiprocessing.get_context("spawn")
    address = f"tcp://127.0.0.1:{free_port()}"
    started = []
    for rank in range(N_RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, World(rank, N_RANKS), address), daemon=True)
        process.start()
        theirs.close()
        started.append(ProcessRank(rank, ours, process))
    try:
        yield started
    finally:
        await close(started)


class Sink(TensorCopy):
    """A receiver in this process, in the place of a GPU, that can be lost after its first tensor."""

    def __init__(self, place: str, *, is_lost: bool = False) -> None:
        super().__init__({})
        self.place, self.is_lost = place, is_lost

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        PLACE.set(self.place)
        return await asyncio.to_thread(self._receive, plan)

    def _receive(self, plan: SyncPlan) -> Receipt:
        receiver = Receiver(plan)
        for name, tensor in receiver:
            self.tensors |= {name: tensor.clone()}
            if self.is_lost:
                raise EngineLostError("engine process 4711 was killed")
        return receiver.receipt


@pytest.mark.parametrize(
    ("place", "is_lost"), [("GPU-0", True), pytest.param("GPU-7", False, marks=pytest.mark.nightly)]
)
async def test_each_rank_sends_again_after_a_receiver_was_replaced(
    place: str, is_lost: bool, tiny_model_path: Path, tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks and receivers share memory as on two GPUs."""
    monkeypatch.setattr(stream_module, "stream_device", lambda plan: torch.device("cpu"))
    monkeypatch.setattr(stream_module, "memory_location", lambda device: PLACE.get())
    lost = Sink(place, is_lost=is_lost)
    sinks = {"engine 0": lost, "engine 1": Sink("GPU-1")}
    n_failures = 0

    async def replace_lost() -> bool:
        nonlocal n_failures
        n_failures += 1
        lost.place, lost.is_lost = "GPU-0", False
        return True

    async with start_ranks(serve) as ranks:
        group = await load_policy(ranks, tiny_model_path)
        sync = WeightSync(group, sinks, SyncOptions("cuda_ipc", ipc_bytes=1 << 16, timeout_s=60))
        sync.recover = replace_lost
        metrics = (await sync(1)).numbers()
        assert n_failures == 1
        assert metrics["sync/verified_copies"] == len(sinks)
        for sink in sinks.values():
            assert all(torch.equal(sink.tensors[name], tensor) for name, tensor in tiny_model.named_parameters())
        assert await group.is_finite()


async def test_a_rank_that_ends_while_the_model_is_probed_is_named(tiny_model_path: Path) -> None:
    cfg = config().trainer
    divided = replace(spec("policy", tiny_model_path, cfg), sequence_parallel_size=N_RANKS)
    async with start_ranks(serve_until_probe) as ranks:
        with pytest.raises(WorkerError, match=r"rank 1 \(process \d+\) ended with exit status 3 during load"):
            await load_group(ranks, divided, policy_objective(cfg))


def serve_damaged(connection: Connection, world: World, address: str) -> None:
    """Serve a rank; rank 1 receives other weights than were sent."""
    receive = Worker.receive_weights

    def receive_damaged(worker: Worker, plan: SyncPlan) -> Receipt:
        receipt = receive(worker, plan)
        return receipt._replace(checksum=receipt.checksum + world.rank)

    Worker.receive_weights = receive_damaged  # type: ignore[method-assign]
    RankHost(world, address, 1).serve(connection)


async def test_a_rank_of_the_reference_with_other_weights_is_noticed(
    tiny_model_path: Path, tiny_model: PreTrainedModel
) -> None:
    cfg = config().trainer
    source = TensorCopy(dict(tiny_model.named_parameters()))
    async with start_ranks(serve_damaged) as ranks:
        group = await load_group(ranks, spec("ref", tiny_model_path, cfg), None)
        sync = WeightSync(source, {"reference": group}, SyncOptions("auto", timeout_s=60))
        with pytest.raises(SyncError, match="the ranks of the ref received different weights"):
            await sync(1)
