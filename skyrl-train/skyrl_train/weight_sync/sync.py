"""One weight sync from end to end: from a model to everybody who holds a copy of its weights."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch.distributed as dist

from skyrl_train.errors import SyncError
from skyrl_train.types.specs import TensorSpec
from skyrl_train.weight_sync.base import Receipt, SyncPlan, Transport
from skyrl_train.weight_sync.broadcast import call_off, chunked
from skyrl_train.weight_sync.shared import release

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """A model whose weights are sent: a `WorkerGroup`."""

    async def tensor_specs(self) -> list[TensorSpec]:
        """Return the model's tensors."""
        ...

    async def send_weights(self, plan: SyncPlan) -> Receipt:
        """Send the weights as `plan` says."""
        ...


class WeightSink(Protocol):
    """A holder of a copy: an `InferenceEngine`, or a `WorkerGroup`."""

    @property
    def n_weight_copies(self) -> int:
        """Processes that receive; each is a receiver of its own."""
        ...

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        """Receive weights, as the receivers `plan.rank` and following."""
        ...


class WeightSync:
    """Sends the weights of one model to some sinks, and makes sure that they have arrived."""

    def __init__(
        self,
        source: WeightSource,
        sinks: Sequence[WeightSink],
        transport: Transport = "shared",
        *,
        chunk_bytes: int = 1 << 28,
        host: str = "127.0.0.1",
        timeout_s: float = 600.0,
    ) -> None:
        """`shared` is for sinks in the process of the source. `host` is where the source's rank 0 can be reached."""
        self._source = source
        self._sinks = list(sinks)
        self._transport: Transport = transport
        self._chunk_bytes = chunk_bytes
        self._host = host
        self._timeout_s = timeout_s

    async def __call__(self, version: int) -> None:
        """Give every sink the weights, as those of `version`. Sinks must be idle or paused.

        Raises:
            SyncError: a sink received other bytes than were sent, or did not receive them in time.
            EngineError: a sink refused, e.g. because it is asleep.
        """
        plan = await self._plan(version)
        first, plans = 1, []
        for sink in self._sinks:
            plans.append(replace(plan, rank=first))
            first += sink.n_weight_copies
        pairs = list(zip(self._sinks, plans, strict=True))
        if self._transport == "shared":
            sent = await self._source.send_weights(plan)  # lays references out; then they can be read
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
                first_error = errors.exceptions[0]  # it cancelled the other tasks, whose processes still wait
                await asyncio.to_thread(_call_off, plan)
                raise first_error from first_error.__cause__
            sent, received = send_task.result(), [task.result() for task in receive_tasks]
        for index, receipt in enumerate(received):
            if receipt != sent:
                raise SyncError(f"weight sync {version}: {sent} was sent and sink {index} has received {receipt}")

    async def _plan(self, version: int) -> SyncPlan:
        if self._transport == "shared":
            return SyncPlan(version, "shared", f"sync-{id(self)}-{version}")
        chunks = chunked(await self._source.tensor_specs(), self._chunk_bytes)
        n_receivers = sum(sink.n_weight_copies for sink in self._sinks)
        address = f"{self._host}:{free_port(self._host)}"
        return SyncPlan(version, "broadcast", address, chunks, n_receivers, timeout_s=self._timeout_s)


def _call_off(plan: SyncPlan) -> None:
    try:
        call_off(plan)
    except (RuntimeError, dist.DistError) as error:
        logger.warning("Weight sync %d could not be called off: %s", plan.version, error)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
