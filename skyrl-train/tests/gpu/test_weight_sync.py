"""Weights between processes on GPUs: through CUDA IPC on one GPU, and through NCCL between two."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest
import torch
from train_kit.runs import run_of
from train_kit.weight_sync import Tensors, plan_for, random_tensors

from skyrl_train.entrypoints import main_base
from skyrl_train.errors import SyncError
from skyrl_train.models.checksum import tensor_checksum
from skyrl_train.weight_sync import Receiver, SyncPlan, send
from skyrl_train.weight_sync.base import Transport

SHAPES = [(7,), (300, 300), (), (0, 3), (1000, 1000)]  # the second fills the first piece, but not all slots
TRANSPORTS = [
    pytest.param("cuda_ipc", id="cuda_ipc"),
    pytest.param(
        "nccl",
        id="nccl",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU per process"),
    ),
]


@pytest.fixture
def tensors() -> Tensors:
    """Weights on the first GPU."""
    return {name: tensor.to("cuda:0") for name, tensor in random_tensors(SHAPES, torch.bfloat16).items()}


def receive(gpu: int, plan: SyncPlan, hangs: bool, results: Connection) -> None:
    """Receive weights on a GPU, and report where they are and their checksums; or hang after the first tensor."""
    torch.cuda.set_device(gpu)
    receiver, found = Receiver(replace(plan, rank=1)), {}
    for name, tensor in receiver:
        found[name] = (tensor.device.index, tensor_checksum(name, tensor))
        if hangs:
            results.send("hanging")
            time.sleep(600)
    results.send((found, receiver.receipt))


@contextmanager
def receiving(plan: SyncPlan, *, hangs: bool = False) -> Iterator[tuple[multiprocessing.Process, Connection]]:
    """Start a process that receives weights: on the sender's GPU with CUDA IPC, on another one with NCCL."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    gpu = 0 if plan.transport == "cuda_ipc" else 1
    process = context.Process(target=receive, args=(gpu, plan, hangs, theirs), daemon=True)
    process.start()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_stay_on_gpus(transport: Transport, tensors: Tensors) -> None:
    for _ in range(3):  # memory and connections of a sync are released
        plan = plan_for(tensors, transport, chunk_bytes=1 << 16)
        with receiving(plan) as (_, results):
            sent = send(plan, iter(tensors.items()))
            found, receipt = results.recv()
        assert receipt == sent
        gpu = 0 if transport == "cuda_ipc" else 1
        assert found == {name: (gpu, tensor_checksum(name, tensor)) for name, tensor in tensors.items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_that_is_killed_is_named(transport: Transport, tensors: Tensors) -> None:
    plan = plan_for(tensors, transport, chunk_bytes=1 << 16)
    with receiving(plan, hangs=True) as (process, results):

        def kill_then_continue() -> Iterator[tuple[str, torch.Tensor]]:
            for index, item in enumerate(tensors.items()):
                if index == len(tensors) - 1:
                    assert results.recv() == "hanging"
                    process.kill()
                yield item

        started = time.monotonic()
        with pytest.raises(SyncError, match="engine 0"):
            send(plan, kill_then_continue())
        assert time.monotonic() - started < 30
    torch.cuda.synchronize()  # nothing is left running on the GPU


@pytest.mark.parametrize("backend", ["auto", "nccl", "cuda_ipc", "shm"])
def test_a_run_on_ray_trains_with_every_transport(
    backend: str, catch_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray  # the only tests that need it

    monkeypatch.setenv("RAY_ADDRESS", "local")
    settings = ["trainer.placement.launcher=ray", "trainer.bf16=false", f"generator.weight_sync_backend={backend}"]
    try:
        main_base.main([*catch_run, *settings])
    finally:
        ray.shutdown()
    run = run_of(catch_run)
    assert run.steps == [0, 1, 2]
    for row in run.metrics:
        assert row["sync/verified_copies"] == 1
        assert row["sync/logprob_gap"] < 1e-3
