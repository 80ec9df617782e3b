import copy
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from train_kit.weight_sync import AdapterSource, MirroredSink, TensorSource, add_random_adapter, change_adapter
from transformers import PreTrainedModel

from skyrl_train.errors import SyncError
from skyrl_train.models.lora import sync_tensors, trained_parameters
from skyrl_train.weight_sync import SyncOptions, WeightMirror, WeightSync
from skyrl_train.weight_sync.base import Transport
from skyrl_train.weight_sync.memory import NAME
from skyrl_train.weight_sync.mirror import allocate_host_memory
from skyrl_train.weight_sync.sync import free_port

pytestmark = pytest.mark.usefixtures("frozen_objects")


def assert_holds(engine: MirroredSink, model: PreTrainedModel) -> None:
    merged = dict(sync_tensors(model, "full", torch.Tensor.detach))
    assert list(engine.tensors) == list(merged)
    assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in merged.items())


@pytest.fixture
def policy(tiny_model: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(tiny_model).bfloat16()
    add_random_adapter(model, rank=2, alpha=3)
    return model


@pytest.mark.parametrize("transport", ["shared", "shared_memory", "gloo"])
async def test_an_adapter_is_merged_into_the_base_that_was_sent_once(
    policy: PreTrainedModel, transport: Transport
) -> None:
    engine = MirroredSink()
    sync = WeightSync(
        AdapterSource(policy), {"the engine": engine}, SyncOptions(transport, timeout_s=10), kind="factors"
    )
    megabytes = []
    for version in range(3):
        change_adapter(policy, version)
        megabytes.append((await sync(version)).numbers().get("sync/megabytes", 0.0))
        assert_holds(engine, policy)
    if transport == "shared":
        assert engine.kinds == ["base_and_factors"] * 3
        assert engine.mirror.tensors == {}, "the base is the policy's own"
        return
    assert engine.kinds == ["base_and_factors", "factors", "factors"]
    n_bytes = sum(p.nbytes for p in trained_parameters(policy).values())
    assert megabytes[1:] == [pytest.approx(n_bytes / 1e6, rel=0.05)] * 2
    assert megabytes[0] > 3 * megabytes[1]


async def test_a_new_engine_receives_the_base_and_all_do_after_a_failure(policy: PreTrainedModel) -> None:
    engines = {"engine 0": MirroredSink(), "engine 1": MirroredSink()}
    options = SyncOptions("auto", timeout_s=10)
    sync = WeightSync(AdapterSource(policy), engines, options, kind="factors")
    await sync(0)
    new = MirroredSink()
    await sync.send_to("engine 1", new, 0)
    assert new.kinds == ["base_and_factors"]
    assert_holds(new, policy)
    change_adapter(policy, 1)
    await sync(1)
    engines["engine 1"].mirror = WeightMirror()
    message = "weight sync 2 does not send all weights, but engine 1 does not hold the others"
    with pytest.raises(SyncError, match=message):
        await sync(2)
    await sync(3)
    assert engines["engine 0"].kinds == ["base_and_factors", "base_and_factors", "factors", "base_and_factors"]
    for engine in engines.values():
        assert_holds(engine, policy)


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
async def test_changes_are_applied_to_the_last_sent_weights(tiny_model: PreTrainedModel, transport: Transport) -> None:
    model = copy.deepcopy(tiny_model).bfloat16()
    engine, options = MirroredSink(), SyncOptions(transport, timeout_s=10, sends_changes=True)
    sync = WeightSync(TensorSource(model.named_parameters), {"the engine": engine}, options)
    megabytes = []
    for version in range(4):
        megabytes.append((await sync(version)).numbers()["sync/megabytes"])
        for name, parameter in model.named_parameters():
            assert torch.equal(engine.tensors[name], parameter)
            parameter.detach().view(-1)[version::100] += 1
    assert max(megabytes[1:]) < 0.1 * megabytes[0]


async def test_changes_since_another_version_are_rejected_and_whole_weights_leave_no_copy(
    tiny_model: PreTrainedModel,
) -> None:
    engine, source = MirroredSink(), TensorSource(tiny_model.named_parameters)
    options = SyncOptions("auto", timeout_s=10, sends_changes=True)
    sync = WeightSync(source, {"engine 0": engine}, options)
    await sync(0)
    await WeightSync(source, {"engine 0": engine}, options)(7)
    source.sent_weights.version = 0
    message = "weight sync 1 does not send all weights, but engine 0 does not hold the others"
    with pytest.raises(SyncError, match=message):
        await sync(1)
    assert engine.mirror.tensors
    await WeightSync(source, {"engine 0": engine}, SyncOptions("auto", timeout_s=10, chunk_bytes=1000))(8)
    assert engine.mirror.tensors == {}
    assert all(torch.equal(engine.tensors[name], p) for name, p in tiny_model.named_parameters())


class ProcessGroup:
    """`Peers` of torch's default process group."""

    def __init__(self) -> None:
        self.rank_in_group, self.world_size = dist.get_rank(), dist.get_world_size()

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def barrier(self) -> None:
        dist.barrier()


def allocate(rank: int, port: int, connection: Connection) -> None:
    """Allocate memory with another process, write a value, and read the other process's value."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    memory = allocate_host_memory(1000, ProcessGroup())
    memory[rank] = 10 + rank
    dist.barrier()
    values, n_values = memory[:3].tolist(), len(memory)
    del memory
    connection.send((values, n_values, NAME in Path("/proc/self/maps").read_text()))
    dist.destroy_process_group()


@pytest.mark.usefixtures("forked_processes")
def test_peers_share_one_block_of_memory() -> None:
    context, port = multiprocessing.get_context("spawn"), free_port()
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=allocate, args=(rank, port, pipes[rank][1]), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        for ours, _ in pipes:
            assert ours.poll(200)
            assert ours.recv() == ([10, 11, 0], 1000, False)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
