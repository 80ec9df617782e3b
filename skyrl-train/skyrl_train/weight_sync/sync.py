"""Weight sync from end to end: from a model to all holders of a copy of its weights."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from skyrl_train.errors import SyncError
from skyrl_train.types.specs import SyncKind, TensorSpec
from skyrl_train.weight_sync.base import Receipt, SyncPlan, Transport
from skyrl_train.weight_sync.broadcast import call_off, chunked, receive_broadcast, send_broadcast
from skyrl_train.weight_sync.shared import receive_shared, release, send_shared


def send(plan: SyncPlan, tensors: Iterator[tuple[str, torch.Tensor]]) -> Receipt:
    """Send tensors, in the order of the plan. Call it on every rank of the model: gathering them is collective."""
    return (send_shared if plan.transport == "shared" else send_broadcast)(plan, tensors)


class Receiver:
    """The receiving end of a plan, in a process that holds a copy of the weights: iterate over the tensors.

    Each tensor is valid until the next one.
    """

    receipt: Receipt
    """Set after the last tensor."""

    def __init__(self, plan: SyncPlan) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        receive = receive_shared if self._plan.transport == "shared" else receive_broadcast
        self.receipt = yield from receive(self._plan)


class WeightSource(Protocol):
    """A model whose weights are sent: a `WorkerGroup`."""

    async def tensor_specs(self, kind: SyncKind) -> list[TensorSpec]:
        """Return the tensors of the model, or of its adapter."""
        ...

    async def send_weights(self, plan: SyncPlan) -> Receipt:
        """Send the weights by `plan`."""
        ...


class WeightSink(Protocol):
    """A holder of a copy: an `InferenceEngine`, or a `WorkerGroup`."""

    @property
    def n_weight_copies(self) -> int:
        """Number of processes that receive; each is a separate receiver."""
        ...

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        """Receive weights, as the receivers `plan.rank` and following."""
        ...


class WeightSync:
    """A channel that sends the weights of one model to its sinks, and checks that they have arrived."""

    def __init__(
        self,
        source: WeightSource,
        sinks: Sequence[WeightSink],
        transport: Transport = "shared",
        *,
        chunk_bytes: int = 1 << 28,
        find_address: Callable[[], Awaitable[str]] | None = None,
        timeout_s: float = 600.0,
        kind: SyncKind = "full",
    ) -> None:
        """Connect source and sinks. `shared` requires them in one process.

        `find_address` returns a free "host:port" of the source's rank 0, which is on this machine by default. Sinks
        without the source's adapter need a sync of the kind `full`; others share or load its base.
        """
        self._source = source
        self._sinks = list(sinks)
        self._transport: Transport = transport
        self._chunk_bytes = chunk_bytes
        self._find_address = find_address or _local_address
        self._timeout_s = timeout_s
        self._kind: SyncKind = kind

    async def __call__(self, version: int) -> None:
        """Send the weights to every sink, as those of `version`. Sinks must be idle or paused.

        Raises:
            SyncError: a sink received different bytes, or none in time.
            EngineError: a sink refused, e.g. because it is asleep.
        """
        plan = await self._plan(version)
        first, plans = 1, []
        for sink in self._sinks:
            plans.append(replace(plan, rank=first))
            first += sink.n_weight_copies
        pairs = list(zip(self._sinks, plans, strict=True))
        if self._transport == "shared":
            sent = await self._source.send_weights(plan)  # stores the references that the sinks read
            try:
                received = [await sink.receive_weights(sink_plan) for sink, sink_plan in pairs]
            finally:
                release(plan.address)
        else:
            try:
                async with asyncio.TaskGroup() as tasks:
                    send_task = tasks.create_task(self._source.send_weights(plan))
                    receive_tasks = [tasks.create_task(sink.receive_weights(sink_plan)) for sink, sink_plan in pairs]
            except ExceptionGroup as errors:
                first_error = errors.exceptions[0]  # it cancelled the other tasks, but their processes still wait
                await asyncio.to_thread(call_off, plan)
                raise first_error from first_error.__cause__
            sent, received = send_task.result(), [task.result() for task in receive_tasks]
        for index, receipt in enumerate(received):
            if receipt != sent:
                raise SyncError(f"weight sync {version}: {sent} was sent, but sink {index} received {receipt}")

    async def _plan(self, version: int) -> SyncPlan:
        if self._transport == "shared":
            return SyncPlan(version, "shared", f"sync-{id(self)}-{version}", kind=self._kind)
        chunks = chunked(await self._source.tensor_specs(self._kind), self._chunk_bytes)
        n_receivers = sum(sink.n_weight_copies for sink in self._sinks)
        address = await self._find_address()
        return SyncPlan(version, "broadcast", address, chunks, n_receivers, timeout_s=self._timeout_s, kind=self._kind)


async def _local_address() -> str:
    return f"127.0.0.1:{free_port()}"


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
