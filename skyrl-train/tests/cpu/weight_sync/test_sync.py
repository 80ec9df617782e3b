import asyncio
import time

import pytest
import torch
from train_kit.weight_sync import TensorCopy, Tensors, specs_of

from skyrl_train.errors import EngineLostError, SyncError
from skyrl_train.types.specs import SyncKind, TensorSpec
from skyrl_train.weight_sync import Receipt, Receiver, SyncOptions, SyncPlan, WeightSync, rendezvous, send
from skyrl_train.weight_sync.sync import free_port

pytestmark = pytest.mark.usefixtures("frozen_objects")

OPTIONS = SyncOptions("auto", timeout_s=60)
CHANGES = SyncOptions("auto", sends_changes=True, timeout_s=60)


def empty_copy(tensors: Tensors) -> TensorCopy:
    return TensorCopy({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})


def assert_holds(copy: TensorCopy, tensors: Tensors) -> None:
    assert all(torch.equal(copy.tensors[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["full", "adapter"])
async def test_whole_models_are_sent_in_the_dtype_of_the_engine_if_it_is_smaller(
    dtype: torch.dtype, kind: SyncKind
) -> None:
    tensors = {"a": torch.randn(3000), "b": torch.randn(100).bfloat16(), "c": torch.arange(10)}
    sent = tensors | {"a": tensors["a"].bfloat16()} if kind == "full" and dtype == torch.bfloat16 else tensors
    sink = empty_copy(sent)
    metrics = (await WeightSync(TensorCopy(tensors), {"engine": sink}, OPTIONS, kind=kind, dtype=dtype)(1)).numbers()
    assert list(sink.plans[0].specs) == specs_of(sent)
    assert metrics["sync/megabytes"] == pytest.approx(sum(tensor.nbytes for tensor in sent.values()) / 1e6, rel=0.05)
    assert_holds(sink, sent)


async def test_a_sync_reports_its_size_and_its_verified_copies(tensors: Tensors) -> None:
    policy, sinks = TensorCopy(tensors), {f"engine {i}": empty_copy(tensors) for i in range(2)}
    metrics = (await WeightSync(policy, sinks, OPTIONS)(7)).numbers()
    assert metrics["sync/verified_copies"] == 2
    assert metrics["sync/megabytes"] == pytest.approx(sum(t.nbytes for t in tensors.values()) / 1e6, rel=0.02)
    for sink in sinks.values():
        assert_holds(sink, tensors)
    unchecked = WeightSync(policy, sinks, SyncOptions("auto", has_checksum=False, timeout_s=60))
    assert (await unchecked(8)).numbers().keys() == {"sync/megabytes"}


class BrokenSink(TensorCopy):
    """A sink that changes values of the receive buffer while it loads them."""

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        receiver = Receiver(plan)

        def read() -> None:
            for _, tensor in receiver:
                if tensor.nbytes > plan.chunk_bytes:
                    tensor.view(-1)[0] += 1

        await asyncio.to_thread(read)
        return receiver.receipt


@pytest.mark.parametrize("broken", [0, 1, 2])
async def test_a_sink_that_holds_other_weights_is_named_wherever_it_is(tensors: Tensors, broken: int) -> None:
    sinks = {f"engine {i}": BrokenSink(tensors) if i == broken else empty_copy(tensors) for i in range(3)}
    sync = WeightSync(TensorCopy(tensors), sinks, SyncOptions("shared_memory", chunk_bytes=64, timeout_s=60))
    with pytest.raises(SyncError, match=f"weight sync 3 failed: engine {broken} holds other weights than the policy"):
        await sync(3)


class LateSource(TensorCopy):
    """A source that starts to send only after the first attempt to call off the sync."""

    error: SyncError | None = None

    async def send_weights(self, plan: SyncPlan) -> Receipt:
        def send_later() -> Receipt:
            time.sleep(rendezvous.CALL_OFF_TIMEOUT_S + 0.5)
            try:
                return send(plan, iter(self.tensors.items()))
            except SyncError as error:
                self.error = error
                raise

        return await asyncio.to_thread(send_later)


class LostSink(TensorCopy):
    """A sink whose process has ended."""

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        raise EngineLostError("engine process 4711 was killed")


async def test_a_lost_sink_ends_a_sync_whose_sender_is_late(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CALL_OFF_TIMEOUT_S", 0.2)
    source = LateSource(tensors)
    sync = WeightSync(source, {"engine 0": LostSink(tensors), "engine 1": empty_copy(tensors)}, OPTIONS)
    with pytest.raises(EngineLostError, match="4711 was killed"):
        await sync(1)
    await asyncio.get_running_loop().shutdown_default_executor()  # waits for the threads of both ends
    assert "was called off: engine process 4711 was killed" in str(source.error), "it waited for the whole timeout"


async def test_changes_follow_a_whole_sync_and_a_whole_sync_follows_a_failure(tensors: Tensors) -> None:
    policy, sink = TensorCopy(tensors), empty_copy(tensors)
    sync = WeightSync(policy, {"engine 0": sink}, CHANGES)
    await sync(0)
    await sync(1)
    tensors["layer.0"] += 1
    tensors["layer.9"] = torch.ones(3)  # the sink does not have it
    with pytest.raises(SyncError, match="no such tensor of the same dtype"):
        await sync(2)
    del tensors["layer.9"]
    await sync(3)
    await sync.send_to("engine 0", sink, 3)
    tensors["layer.1"] += 1
    await sync(4)
    assert [plan.base_version for plan in sink.plans] == [None, 0, 1, None, None, None]
    assert_holds(sink, tensors)


class SerialSource(TensorCopy):
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
    survivor, replacement = empty_copy(tensors), empty_copy(tensors)
    sync = WeightSync(SerialSource(tensors), {"engine 0": survivor, "engine 1": replacement}, CHANGES)
    await sync(1)
    tensors["layer.0"] += 1  # an update that only the replacement receives as version 1
    await asyncio.gather(sync.send_to("engine 1", replacement, 1), sync(2))
    assert [plan.base_version for plan in survivor.plans] == [None, None]
    for sink in (survivor, replacement):
        assert_holds(sink, tensors)


async def test_a_sink_that_is_replaced_while_a_sync_is_planned_gets_all_weights(tensors: Tensors) -> None:
    """The plan waits for an address of another node, and for the source's specs."""
    is_planning, may_plan = asyncio.Event(), asyncio.Event()
    may_plan.set()

    async def find_address() -> str:
        is_planning.set()
        await may_plan.wait()
        return f"127.0.0.1:{free_port()}"

    survivor, replacement = empty_copy(tensors), empty_copy(tensors)
    sinks = {"engine 0": survivor, "engine 1": replacement}
    sync = WeightSync(SerialSource(tensors), sinks, CHANGES, find_address=find_address)
    await sync(1)
    tensors["layer.0"] += 1
    is_planning.clear()
    may_plan.clear()
    running = asyncio.create_task(sync(2))
    await is_planning.wait()
    for tensor in replacement.tensors.values():  # it starts without weights
        tensor.zero_()
    sync.forget()
    may_plan.set()
    await running
    assert [plan.base_version for plan in survivor.plans] == [None, None]
    for sink in sinks.values():
        assert_holds(sink, tensors)
