import gc
import multiprocessing
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from train_kit.processes import python
from train_kit.weight_sync import TensorCopy, Tensors, plan_for, random_tensors, receive, transfer

from skyrl_train.errors import SyncError
from skyrl_train.weight_sync import Receipt, Receiver, SyncOptions, SyncPlan, WeightSync, rendezvous, send
from skyrl_train.weight_sync import stream as stream_module
from skyrl_train.weight_sync.base import Transport
from skyrl_train.weight_sync.memory import NAME, SharedMemory, open_memory

pytestmark = pytest.mark.usefixtures("frozen_objects", "gpus_are_cpus")


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def open_segments() -> int:
    """Return the number of this process's files and mappings of shared weights."""
    gc.collect()  # errors of other tests may hold tensors
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    files = [os.readlink(link) for link in links if os.path.islink(link)]
    return sum(NAME in line for line in [*files, *Path("/proc/self/maps").read_text().splitlines()])


@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "auto", "nccl", "cuda_ipc"])
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=2).map(tuple), max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    chunk_bytes=st.integers(300, 5000),
    n_receivers=st.integers(1, 3),
    is_own=st.booleans(),
)
def test_receivers_get_every_bit(
    transport: Transport,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    chunk_bytes: int,
    n_receivers: int,
    is_own: bool,
) -> None:
    tensors = random_tensors(shapes, dtype)
    plan = plan_for(tensors, transport, chunk_bytes=chunk_bytes, n_receivers=n_receivers)
    own = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()} if is_own and n_receivers == 1 else None
    n_segments = open_segments()
    sent, received = transfer(plan, tensors, into=own)
    for got, receipt in received:
        assert list(got) == list(tensors)
        assert all(bits(got[name]) == bits(tensor) and got[name].dtype == dtype for name, tensor in tensors.items())
        assert receipt == sent
    if own is not None:
        assert all(bits(own[name]) == bits(tensor) for name, tensor in tensors.items())
    assert open_segments() == n_segments


def test_the_stream_takes_less_memory_than_its_tensors(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    create = SharedMemory.create
    monkeypatch.setattr(SharedMemory, "create", lambda size, device: sizes.append(size) or create(size, device))
    transfer(plan_for(tensors, chunk_bytes=1000), tensors)
    assert sizes == [stream_module.N_SLOTS * 1024]


def test_receivers_on_other_machines_use_gloo_in_the_same_sync(
    tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_first = threading.Lock()

    def open_once(address: str, device: torch.device) -> SharedMemory | None:
        return open_memory(address, device) if is_first.acquire(blocking=False) else None

    monkeypatch.setattr(stream_module, "open_memory", open_once)
    sent, received = transfer(plan_for(tensors, "auto", n_receivers=3), tensors)
    for got, receipt in received:
        assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
        assert receipt == sent


def test_memory_of_another_process_is_not_opened() -> None:
    memory = SharedMemory.create(100)
    process, fd, name = memory.address.split("/")
    assert open_memory(f"{process}/0/{name}") is None  # another file of this process
    assert open_memory(f"999999999/{fd}/{name}") is None
    memory.close()
    assert open_memory(memory.address) is None


def test_a_receiver_casts_to_its_own_dtype(tensors: Tensors) -> None:
    own = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    sent, [(got, receipt)] = transfer(plan_for(tensors), tensors, into=own)
    assert {tensor.dtype for tensor in got.values()} == {torch.float32}
    assert receipt == sent


def test_a_function_that_hangs_raises_after_the_timeout() -> None:
    release = threading.Event()
    with pytest.raises(SyncError, match="too slow"):
        stream_module.run_within(0.1, lambda: release.wait(20) and None, "too slow")
    release.set()
    with pytest.raises(ValueError, match="broken"):
        stream_module.run_within(20, lambda: int("broken") and None, "too slow")


SENDER = """
import sys, torch
from train_kit.weight_sync import plan_for, send
from dataclasses import replace
tensors = {str(i): torch.ones(1 << 16) for i in range(100)}
plan = plan_for(tensors, "shared_memory", chunk_bytes=1 << 18, names=())
send(replace(plan, address=sys.argv[1]), iter(tensors.items()))
"""


def test_a_sender_that_is_killed_ends_its_receiver() -> None:
    tensors = {str(i): torch.ones(1 << 16) for i in range(100)}
    plan = plan_for(tensors, "shared_memory", chunk_bytes=1 << 18, names=(), rank=1)
    n_segments, n_received = open_segments(), 0
    with subprocess.Popen([python(), "-c", SENDER, plan.address]) as process:

        def read() -> None:
            nonlocal n_received
            for _ in Receiver(plan):
                n_received += 1
                if n_received == 50:
                    process.kill()
                    process.wait()

        with pytest.raises(SyncError, match="weight sync 1 broke off: the sender ended before it could send"):
            read()
    assert 50 <= n_received < 100
    assert open_segments() == n_segments


# -- several ranks that send


async def test_memory_of_cuda_ipc_is_bounded(tensors: Tensors) -> None:
    copies = TensorCopy(tensors), TensorCopy(tensors)
    sync = WeightSync(copies[0], {"engine": copies[1]}, SyncOptions("cuda_ipc", ipc_bytes=4096))
    plan = await sync._plan(sync.sinks, 1)
    assert stream_module.slot_bytes(plan) * stream_module.N_SLOTS == 4096


def send_as_rank(rank: int, store: str, plan: SyncPlan, tensors: Tensors, outcomes: Any) -> None:
    """Send the weights as one of two ranks of a model, whose memory only receivers in the same place can open."""
    stream_module.stream_device = lambda plan: torch.device("cpu")
    stream_module.memory_location = lambda device: f"GPU-{rank}"
    rendezvous.LINGER_S = 0.5
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        outcomes.put((rank, os.getpid(), send(plan, iter(tensors.items()))))
    except SyncError as error:
        outcomes.put((rank, os.getpid(), str(error)))
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize("places", [["GPU-0", "GPU-1"], ["GPU-1", "GPU-1", "GPU-0"], ["GPU-0", "GPU-2"]])
def test_each_rank_serves_the_receivers_on_its_gpu(
    places: list[str], tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, int]] = []  # receivers' places, and the processes whose memory they opened

    def open_recorded(address: str, device: torch.device) -> SharedMemory | None:
        opened.append((threading.current_thread().name, int(address.partition("/")[0])))
        return open_memory(address)

    monkeypatch.setattr(stream_module, "memory_location", lambda device: threading.current_thread().name)
    monkeypatch.setattr(stream_module, "open_memory", open_recorded)
    plan = plan_for(tensors, "cuda_ipc", n_receivers=len(places), timeout_s=100.0)
    results: list[tuple[Tensors, Receipt] | SyncError] = []

    def run(rank: int) -> None:
        try:
            results.append(receive(replace(plan, rank=rank)))
        except SyncError as error:
            results.append(error)

    threads = [threading.Thread(target=run, args=(i + 1,), name=place) for i, place in enumerate(places)]
    context = multiprocessing.get_context("spawn")
    outcomes = context.Queue()
    arguments = (str(tmp_path / "store"), plan, tensors, outcomes)
    senders = [context.Process(target=send_as_rank, args=(rank, *arguments)) for rank in range(2)]
    for runner in (*senders, *threads):
        runner.start()
    pids, sent = {}, {}
    for _ in senders:
        rank, pid, outcome = outcomes.get(timeout=200)
        pids[rank], sent[rank] = pid, outcome
    for runner in (*senders, *threads):
        runner.join(60)
    if "GPU-2" in places:
        assert "engine 1 is on none of the GPUs of the sending ranks" in sent[0]
        assert sent[1] == sent[0]
        assert all(isinstance(result, SyncError) for result in results)
        return
    assert sorted(opened) == sorted((place, pids[int(place[-1])]) for place in places)
    for result in results:
        assert not isinstance(result, SyncError)
        got, receipt = result
        assert receipt == sent[0]
        assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
