"""Weights from a sender to receivers, through shared memory and gloo."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_train.errors import EngineLostError, SyncError
from skyrl_train.types.specs import SyncKind, TensorSpec
from skyrl_train.weight_sync import (
    Receipt,
    Receiver,
    SyncOptions,
    SyncPlan,
    WeightSync,
    rendezvous,
    send,
    transport_between,
)
from skyrl_train.weight_sync import stream as stream_module
from skyrl_train.weight_sync.base import Transport
from skyrl_train.weight_sync.cuda_ipc import decode_handle, encode_handle
from skyrl_train.weight_sync.rendezvous import ReceiverEndpoint, call_off
from skyrl_train.weight_sync.shared_memory import NAME, SharedMemory, open_memory
from skyrl_train.weight_sync.sync import free_port
from skyrl_train.weight_sync.transfer import SentWeights

pytestmark = pytest.mark.usefixtures("frozen_objects")

Tensors = dict[str, torch.Tensor]
TRANSPORTS: tuple[Transport, ...] = ("shared_memory", "gloo", "auto", "nccl", "cuda_ipc")
NAMES = ("rank 0 of the policy", "engine 0", "engine 1", "engine 2")


def specs_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())


def plan_for(tensors: Mapping[str, torch.Tensor], transport: Transport = "auto", **options: object) -> SyncPlan:
    defaults: dict[str, object] = {"timeout_s": 10.0, "names": NAMES, "chunk_bytes": 1024}
    address = f"127.0.0.1:{free_port()}"
    return SyncPlan(1, transport, address, (specs_of(tensors),), **{**defaults, **options})  # type: ignore[arg-type]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def receive(plan: SyncPlan, into: Mapping[str, torch.Tensor] | None = None) -> tuple[Tensors, Receipt]:
    receiver = Receiver(plan, into)
    return {name: tensor.clone() for name, tensor in receiver}, receiver.receipt


def transfer(
    plan: SyncPlan,
    tensors: Tensors,
    *,
    into: Mapping[str, torch.Tensor] | None = None,
    sent_weights: SentWeights | None = None,
) -> tuple[Receipt, list[tuple[Tensors, Receipt]]]:
    """Run the sender and all receivers in threads."""
    with ThreadPoolExecutor(plan.n_receivers + 1) as threads:
        receiving = [threads.submit(receive, replace(plan, rank=i + 1), into) for i in range(plan.n_receivers)]
        sent = threads.submit(send, plan, iter(tensors.items()), sent_weights)
        return sent.result(), [future.result() for future in receiving]


def random_tensors(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(shape, generator=generator).to(dtype) for i, shape in enumerate(shapes)}


@pytest.fixture
def tensors() -> Tensors:
    return random_tensors([(5, 3), (2000,), (), (0, 4), (64, 65)], torch.float32)


def open_segments() -> int:
    """Return the number of this process's files and mappings of shared weights."""
    gc.collect()  # errors of other tests may hold tensors
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)]
    return sum(NAME in line for line in [*files, *Path("/proc/self/maps").read_text().splitlines()])


def _exists(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


@pytest.fixture(autouse=True)
def gpus_are_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the slots of `nccl` and `cuda_ipc` on the CPU, where gloo and shared memory take the place of both."""
    monkeypatch.setattr(stream_module, "stream_device", lambda plan: torch.device("cpu"))


# -- contents


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    sizes = []
    create = SharedMemory.create
    monkeypatch.setattr(SharedMemory, "create", lambda size: sizes.append(size) or create(size))
    transfer(plan_for(tensors, chunk_bytes=1000), tensors)
    assert sizes == [stream_module.N_SLOTS * 1024]


def test_receivers_on_other_machines_take_gloo_in_the_same_sync(
    tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_first = threading.Lock()

    def open_once(address: str) -> SharedMemory | None:
        return open_memory(address) if is_first.acquire(blocking=False) else None

    monkeypatch.setattr(stream_module, "open_memory", open_once)
    sent, received = transfer(plan_for(tensors, "auto", n_receivers=3), tensors)
    for got, receipt in received:
        assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
        assert receipt == sent


def test_memory_of_another_process_number_is_not_opened() -> None:
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


# -- changes


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([torch.bfloat16, torch.float32]), st.floats(0, 1), st.integers(0, 100))
def test_changes_make_receivers_equal_to_the_sender(dtype: torch.dtype, density: float, seed: int) -> None:
    tensors = random_tensors([(40, 30), (7,), (3, 500)], dtype, seed)
    own, sent_weights = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, SentWeights()
    transfer(plan_for(tensors, tracks_changes=True), tensors, into=own, sent_weights=sent_weights)
    generator = torch.Generator().manual_seed(seed)
    for version in (2, 3):
        for tensor in tensors.values():
            is_changed = torch.rand(tensor.shape, generator=generator) < density**3
            tensor.add_(torch.where(is_changed, torch.randn(tensor.shape, generator=generator), 0).to(dtype))
        plan = replace(plan_for(tensors, tracks_changes=True, base_version=version - 1), version=version)
        sent, [(_, receipt)] = transfer(plan, tensors, into=own, sent_weights=sent_weights)
        assert all(bits(own[name]) == bits(tensor) for name, tensor in tensors.items())
        assert receipt == sent


def test_few_changes_are_a_short_stream() -> None:
    tensors = random_tensors([(300, 300)], torch.bfloat16)
    own, sent_weights = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, SentWeights()
    whole, _ = transfer(plan_for(tensors, tracks_changes=True), tensors, into=own, sent_weights=sent_weights)
    tensors["layer.0"][:, :3] += 1
    plan = replace(plan_for(tensors, tracks_changes=True, base_version=1), version=2)
    changes, _ = transfer(plan, tensors, into=own, sent_weights=sent_weights)
    assert torch.equal(own["layer.0"], tensors["layer.0"])
    assert changes.n_bytes == whole.n_bytes
    assert changes.n_sent < whole.n_sent / 30


def test_changes_on_other_weights_are_noticed() -> None:
    tensors = random_tensors([(30, 30)], torch.float32)
    own, sent_weights = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, SentWeights()
    transfer(plan_for(tensors, tracks_changes=True), tensors, into=own, sent_weights=sent_weights)
    own["layer.0"][7, 7] += 1
    plan = replace(plan_for(tensors, tracks_changes=True, base_version=1), version=2)
    sent, [(_, receipt)] = transfer(plan, tensors, into=own, sent_weights=sent_weights)
    assert receipt.checksum != sent.checksum


def test_changes_of_another_version_are_refused(tensors: Tensors) -> None:
    sent_weights = SentWeights()
    plan = plan_for(tensors, tracks_changes=True, base_version=4)
    with pytest.raises(SyncError, match="changes since version 4, but the sender has kept version None"):
        send(plan, iter(tensors.items()), sent_weights)


# -- failures


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_missing_receiver_is_named_within_the_timeout(
    transport: Transport, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LINGER_S", 1.0)
    plan = plan_for(tensors, transport, n_receivers=3, timeout_s=0.7)
    begin, gathered = time.monotonic(), iter(tensors.items())
    with ThreadPoolExecutor(2) as threads:
        present = threads.submit(receive, replace(plan, rank=2))
        with pytest.raises(SyncError, match=r"weight sync 1: engine 0, engine 2 did not connect within 0\.7 s"):
            send(plan, gathered)
        assert next(gathered, None) is None, "the other ranks wait for this one to gather the rest"
        with pytest.raises(SyncError):
            present.result()
    assert time.monotonic() - begin < 5


def test_a_receiver_that_connects_slowly_has_one_timeout_for_all_stages(tensors: Tensors) -> None:
    plan, is_over = plan_for(tensors, timeout_s=3.0), threading.Event()

    def connect_slowly() -> None:
        endpoint = ReceiverEndpoint(replace(plan, rank=1))
        time.sleep(2)
        endpoint.send("here")
        is_over.wait(20)
        endpoint.close()

    begin = time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(connect_slowly)
        with pytest.raises(SyncError, match="engine 0 did not connect within 3 s"):
            send(plan, iter(tensors.items()))
        assert time.monotonic() - begin < 4.5, "the other ranks of the model would have given up"
        is_over.set()


def test_a_receiver_that_hangs_is_named_within_the_timeout(tensors: Tensors) -> None:
    plan, is_over = plan_for(tensors, n_receivers=2, timeout_s=1.0), threading.Event()

    def hang() -> None:
        for _ in Receiver(replace(plan, rank=1)):
            is_over.wait(20)

    with ThreadPoolExecutor(2) as threads:
        threads.submit(hang)
        reading = threads.submit(receive, replace(plan, rank=2))
        with pytest.raises(SyncError, match=r"engine 0 did not read the weights within 1 s"):
            send(plan, iter(tensors.items()))
        is_over.set()
        with pytest.raises(SyncError):
            reading.result()


def test_a_receiver_that_cannot_load_ends_the_sender_at_once(tensors: Tensors) -> None:
    plan = plan_for(tensors)

    def refuse() -> None:
        for _ in Receiver(replace(plan, rank=1)):
            raise ValueError("wrong shape")

    with ThreadPoolExecutor(1) as threads:
        refusing = threads.submit(refuse)
        with pytest.raises(SyncError, match="engine 0 stopped receiving: it could not load them"):
            send(plan, iter(tensors.items()))
        with pytest.raises(ValueError, match="wrong shape"):
            refusing.result()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda tensors: tensors.pop("layer.4"), r"no tensor \(0,\)"),  # the model has fewer tensors than the plan
        (lambda tensors: tensors.update({"layer.4": torch.ones(1)}), r"layer.4 \(1,\)"),
    ],
)
def test_tensors_that_differ_from_the_plan_end_both_ends(
    tensors: Tensors, change: Callable[[Tensors], object], found: str
) -> None:
    plan = plan_for(tensors)
    change(tensors)
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(receive, replace(plan, rank=1))
        with pytest.raises(SyncError, match=f"the model has {found} where the plan has .*"):
            send(plan, iter(tensors.items()))
        with pytest.raises(SyncError):
            receiving.result()


def test_receivers_of_a_sync_that_was_called_off_learn_the_reason(tensors: Tensors) -> None:
    plan = plan_for(tensors, n_receivers=2, timeout_s=20.0)
    with ThreadPoolExecutor(2) as threads:
        sending = threads.submit(send, plan, iter(tensors.items()))
        time.sleep(0.3)
        call_off(plan, RuntimeError("engine 1 is on fire"), failed=[1, 2])
        with pytest.raises(SyncError, match="called off: engine 1 is on fire"):
            sending.result(timeout=5)


def test_shared_memory_between_machines_is_refused_by_name(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "open_memory", lambda address: None)
    plan = plan_for(tensors, "shared_memory")
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(receive, replace(plan, rank=1))
        with pytest.raises(
            SyncError, match=r"engine 0 cannot open the memory of rank 0 .*generator.weight_sync_backend=auto"
        ):
            send(plan, iter(tensors.items()))
        with pytest.raises(SyncError):
            receiving.result()


SENDER = """
import sys, torch
from skyrl_train.types.specs import TensorSpec
from skyrl_train.weight_sync import SyncPlan, send
specs = tuple(TensorSpec(str(i), (1 << 18,), torch.float32) for i in range(400))
plan = SyncPlan(1, "shared_memory", sys.argv[1], (specs,), chunk_bytes=1 << 20, timeout_s=20.0)
send(plan, iter((spec.name, torch.ones(spec.shape)) for spec in specs))
"""


def test_a_sender_that_is_killed_ends_its_receiver_and_leaves_nothing() -> None:
    specs = tuple(TensorSpec(str(i), (1 << 18,), torch.float32) for i in range(400))
    plan = SyncPlan(
        1, "shared_memory", f"127.0.0.1:{free_port()}", (specs,), rank=1, chunk_bytes=1 << 20, timeout_s=20.0
    )
    n_segments = open_segments()
    with subprocess.Popen([sys.executable, "-c", SENDER, plan.address], stderr=subprocess.PIPE) as process:
        n_received = 0

        def read() -> None:
            nonlocal n_received
            for _ in Receiver(plan):
                n_received += 1
                if n_received == 50:
                    process.send_signal(signal.SIGKILL)
                    process.wait()

        with pytest.raises(SyncError, match="weight sync 1 broke off: the sender ended before it could send"):
            read()
    assert 50 <= n_received < 400
    assert open_segments() == n_segments
    assert not [name for name in os.listdir("/dev/shm") if NAME in name]


# -- GPUs


@pytest.mark.parametrize(
    ("options", "device", "shares_devices", "expected"),
    [
        (SyncOptions("nccl"), "cuda", False, "nccl"),
        (SyncOptions("nccl"), "cuda", True, "cuda_ipc"),
        (SyncOptions("nccl"), "cpu", True, "auto"),
        (SyncOptions("cuda_ipc"), "cuda", True, "cuda_ipc"),
        (SyncOptions("cuda_ipc"), "cpu", False, "auto"),
        (SyncOptions("auto", prefers_gpus=True), "cuda", True, "cuda_ipc"),
        (SyncOptions("auto", prefers_gpus=True), "cuda", False, "nccl"),
        (SyncOptions("auto", prefers_gpus=True), "cpu", False, "auto"),
        (SyncOptions("auto"), "cuda", True, "auto"),
        (SyncOptions("gloo", prefers_gpus=True), "cuda", True, "gloo"),
    ],
)
def test_the_transport_follows_the_devices(
    options: SyncOptions, device: str, shares_devices: bool, expected: Transport
) -> None:
    assert transport_between(options, torch.device(device), shares_devices=shares_devices) == expected


def test_memory_of_cuda_ipc_is_bounded(tensors: Tensors) -> None:
    sync = WeightSync(Model(tensors), {"engine": Model(tensors)}, SyncOptions("cuda_ipc", ipc_bytes=4096))
    plan = asyncio.run(sync._plan(sync._sinks, 1))
    assert stream_module.slot_bytes(plan) * stream_module.N_SLOTS == 4096


@settings(deadline=None)
@given(st.lists(st.binary(max_size=70) | st.integers(0, 2**63) | st.booleans(), max_size=9))
def test_handles_survive_their_text(fields: list[bytes | int | bool]) -> None:
    found = decode_handle(encode_handle(fields))
    assert found == fields
    assert [type(x) for x in found] == [type(x) for x in fields]


def test_a_function_that_hangs_is_given_up() -> None:
    release = threading.Event()
    with pytest.raises(SyncError, match="too slow"):
        stream_module.run_within(0.1, lambda: release.wait(20) and None, lambda: "too slow")
    release.set()
    with pytest.raises(ValueError, match="broken"):
        stream_module.run_within(5, lambda: int("broken") and None, lambda: "too slow")


def send_as_rank(rank: int, store: str, plan: SyncPlan, tensors: Tensors, outcomes: Any) -> None:
    """Send the weights as one of two ranks of a model, whose memory only receivers in the same place can open."""
    stream_module.stream_device = lambda plan: torch.device("cpu")
    stream_module.memory_location = lambda device: f"GPU-{rank}"
    rendezvous.LINGER_S = 0.5
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        outcomes.put((rank, send(plan, iter(tensors.items()))))
    except SyncError as error:
        outcomes.put((rank, str(error)))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("places", [["GPU-0", "GPU-1"], ["GPU-1", "GPU-1", "GPU-0"], ["GPU-0", "GPU-2"]])
def test_each_rank_serves_the_receivers_on_its_gpu(
    places: list[str], tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, str]] = []  # receivers' places, and the processes whose memory they opened

    def open_recorded(address: str, device: torch.device) -> SharedMemory | None:
        opened.append((threading.current_thread().name, address.partition("/")[0]))
        return open_memory(address)

    monkeypatch.setattr(stream_module, "memory_location", lambda device: threading.current_thread().name)
    monkeypatch.setattr(stream_module, "open_device_memory", open_recorded)
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
    senders = [
        context.Process(target=send_as_rank, args=(rank, str(tmp_path / "store"), plan, tensors, outcomes))
        for rank in range(2)
    ]
    for runner in (*senders, *threads):
        runner.start()
    sent = dict(outcomes.get(timeout=200) for _ in senders)
    for runner in (*senders, *threads):
        runner.join(30)
    if "GPU-2" in places:
        assert "engine 1 is on none of the GPUs of the sending ranks" in sent[0]
        assert sent[1] == sent[0]
        assert all(isinstance(result, SyncError) for result in results)
        return
    assert sorted(opened) == sorted((place, str(senders[int(place[-1])].pid)) for place in places)
    for result in results:
        assert not isinstance(result, SyncError)
        got, receipt = result
        assert receipt == sent[0]
        assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


# -- the channel


class Model:
    """A source and a sink in this process."""

    n_weight_copies = 1

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.sent_weights = SentWeights()
        self.plans: list[SyncPlan] = []

    async def tensor_specs(self, kind: SyncKind) -> list[TensorSpec]:
        return list(specs_of(self.tensors))

    async def send_weights(self, plan: SyncPlan) -> Receipt:
        sent_weights = self.sent_weights if plan.tracks_changes else None
        return await asyncio.to_thread(send, plan, iter(self.tensors.items()), sent_weights)

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        self.plans.append(plan)
        return (await asyncio.to_thread(receive, plan, self.tensors))[1]


class BrokenModel(Model):
    """A sink that changes values while it takes tensors over, which it receives in buffers of its own."""

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        receiver = Receiver(plan)

        def read() -> None:
            for _, tensor in receiver:
                if tensor.nbytes > plan.chunk_bytes:
                    tensor.view(-1)[0] += 1

        await asyncio.to_thread(read)
        return receiver.receipt


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["full", "adapter"])
async def test_whole_models_are_sent_in_the_type_of_the_engine_if_it_is_smaller(
    dtype: torch.dtype, kind: SyncKind
) -> None:
    tensors = {"a": torch.randn(3000), "b": torch.randn(100).bfloat16(), "c": torch.arange(10)}
    sent = tensors | {"a": tensors["a"].bfloat16()} if kind == "full" and dtype == torch.bfloat16 else tensors
    sink = Model({name: torch.zeros_like(tensor) for name, tensor in sent.items()})
    sync = WeightSync(Model(tensors), {"engine": sink}, SyncOptions("auto", timeout_s=10), kind=kind, dtype=dtype)
    metrics = (await sync(1)).numbers()
    assert sink.plans[0].specs == list(specs_of(sent))
    assert metrics["sync/megabytes"] == pytest.approx(sum(tensor.nbytes for tensor in sent.values()) / 1e6, rel=0.05)
    assert all(torch.equal(sink.tensors[name], tensor) for name, tensor in sent.items())


async def test_a_sync_reports_its_size_and_its_verified_copies(tensors: Tensors) -> None:
    policy = Model(tensors)
    sinks = [Model({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}) for _ in range(2)]
    sync = WeightSync(policy, {"engine 0": sinks[0], "engine 1": sinks[1]}, SyncOptions("auto", timeout_s=10))
    metrics = (await sync(7)).numbers()
    assert metrics["sync/verified_copies"] == 2
    assert metrics["sync/megabytes"] == pytest.approx(sum(t.nbytes for t in tensors.values()) / 1e6, rel=0.02)
    for sink in sinks:
        assert all(torch.equal(sink.tensors[name], tensor) for name, tensor in tensors.items())
    unchecked = WeightSync(policy, {"engine 0": sinks[0]}, SyncOptions("auto", has_checksum=False, timeout_s=10))
    assert (await unchecked(8)).numbers().keys() == {"sync/megabytes"}


async def test_a_sink_that_holds_other_weights_is_named(tensors: Tensors) -> None:
    policy, good, broken = Model(tensors), Model(dict(tensors)), BrokenModel({k: v.clone() for k, v in tensors.items()})
    options = SyncOptions("shared_memory", chunk_bytes=64, timeout_s=10)
    sync = WeightSync(policy, {"engine 0": good, "engine 1": broken}, options)
    with pytest.raises(SyncError, match="weight sync 3 failed: engine 1 holds other weights than the policy"):
        await sync(3)


class SlowModel(Model):
    """A source that begins to send only after a failed sync would have been called off once."""

    async def send_weights(self, plan: SyncPlan) -> Receipt:
        def send_later() -> Receipt:
            time.sleep(rendezvous.CALL_OFF_TIMEOUT_S + 0.5)
            return send(plan, iter(self.tensors.items()))

        return await asyncio.to_thread(send_later)


class LostModel(Model):
    """A sink whose process has ended."""

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        raise EngineLostError("engine process 4711 was killed")


async def test_a_sink_that_is_lost_ends_a_sync_whose_sender_is_late(
    tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "CALL_OFF_TIMEOUT_S", 0.2)
    policy, good = SlowModel(tensors), Model({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    sync = WeightSync(policy, {"engine 0": LostModel(tensors), "engine 1": good}, SyncOptions("auto", timeout_s=60))
    begin = time.monotonic()
    with pytest.raises(EngineLostError, match="4711 was killed"):
        await sync(1)
    await asyncio.get_running_loop().shutdown_default_executor()  # waits for the threads of both ends
    assert time.monotonic() - begin < 20


async def test_changes_follow_a_whole_sync_and_a_failed_one_is_followed_by_a_whole_one(tensors: Tensors) -> None:
    policy, sink = Model(tensors), Model({k: v.clone() for k, v in tensors.items()})
    sync = WeightSync(policy, {"engine 0": sink}, SyncOptions("auto", sends_changes=True, timeout_s=10))
    await sync(0)
    await sync(1)
    tensors["layer.0"] += 1
    tensors["layer.9"] = torch.ones(3)  # which the sink does not have
    with pytest.raises(SyncError, match="no such tensor of the same dtype"):
        await sync(2)
    del tensors["layer.9"]
    await sync(3)
    await sync.send_to("engine 0", sink, 3)
    tensors["layer.1"] += 1
    await sync(4)
    assert [plan.base_version for plan in sink.plans] == [None, 0, 1, None, None, None]
    assert all(torch.equal(sink.tensors[name], tensor) for name, tensor in tensors.items())


class SerialModel(Model):
    """A source that takes one call at a time, in order."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.lock = asyncio.Lock()

    async def tensor_specs(self, kind: SyncKind) -> list[TensorSpec]:
        async with self.lock:
            return await super().tensor_specs(kind)

    async def send_weights(self, plan: SyncPlan) -> Receipt:
        async with self.lock:
            return await super().send_weights(plan)


async def test_a_sync_that_begins_during_a_replacement_sends_no_changes(tensors: Tensors) -> None:
    policy = SerialModel(tensors)
    survivor, replacement = (Model({k: v.clone() for k, v in tensors.items()}) for _ in range(2))
    sinks = {"engine 0": survivor, "engine 1": replacement}
    sync = WeightSync(policy, sinks, SyncOptions("auto", sends_changes=True, timeout_s=10))
    await sync(1)
    tensors["layer.0"] += 1  # an update that only the replacement receives as version 1
    await asyncio.gather(sync.send_to("engine 1", replacement, 1), sync(2))
    assert [plan.base_version for plan in survivor.plans] == [None, None]
    for sink in sinks.values():
        assert all(torch.equal(sink.tensors[name], tensor) for name, tensor in tensors.items())
