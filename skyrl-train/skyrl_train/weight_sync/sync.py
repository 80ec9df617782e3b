"""Weight sync from end to end: from a model to all holders of a copy of its weights."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from skyrl_train.errors import EngineError, SyncError
from skyrl_train.types import Metrics
from skyrl_train.types.specs import SyncKind, TensorSpec
from skyrl_train.weight_sync.base import Receipt, SyncPlan, Transport, split_into_chunks
from skyrl_train.weight_sync.rendezvous import LINGER_S, MAX_POLL_S, call_off
from skyrl_train.weight_sync.shared import receive_shared, release, send_shared
from skyrl_train.weight_sync.stream import N_SLOTS
from skyrl_train.weight_sync.transfer import SentWeights, receive_stream, send_stream

ADVICE = "Training on its samples would be wrong; rerun the command to resume from the last checkpoint"


def send(
    plan: SyncPlan, tensors: Iterator[tuple[str, torch.Tensor]], sent_weights: SentWeights | None = None
) -> Receipt:
    """Send tensors, in the order of the plan. Call it on every rank of the model: gathering them is collective.

    A plan that `tracks_changes` needs the `sent_weights` of the previous call, which it updates.
    """
    return send_shared(plan, tensors) if plan.transport == "shared" else send_stream(plan, tensors, sent_weights)


class Receiver:
    """The receiving end of a plan, in a process that holds a copy of the weights: iterate over the tensors.

    Each tensor is valid until the next one.
    """

    receipt: Receipt
    """Set after the last tensor."""

    def __init__(self, plan: SyncPlan, into: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write tensors of the same name, shape and dtype straight `into` those of the receiver, and yield these.

        The receipt then proves what the receiver holds. Without them, a plan with a `base_version` fails.
        """
        self._plan = plan
        self._into = into or {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        is_shared = self._plan.transport == "shared"
        self.receipt = yield from receive_shared(self._plan) if is_shared else receive_stream(self._plan, self._into)


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


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """The settings of a weight sync."""

    transport: Transport = "shared"
    prefers_gpus: bool = False  # `auto` does not leave the GPUs, where both ends are on them
    chunk_bytes: int = 1 << 24  # size of a piece of the stream
    ipc_bytes: int = 10**9  # of each GPU, for all pieces that `cuda_ipc` holds there
    timeout_s: float = 300.0
    has_checksum: bool = True
    sends_changes: bool = False  # since the last sync, instead of all weights, where that is shorter


def transport_between(options: SyncOptions, device: torch.device, *, shares_devices: bool) -> Transport:
    """Return the transport between models on this kind of device, of which a receiver may share one with the sender."""
    if options.transport not in ("nccl", "cuda_ipc") and not (options.transport == "auto" and options.prefers_gpus):
        return options.transport
    if device.type == "cpu":
        return "auto"
    return "cuda_ipc" if shares_devices else "nccl"  # NCCL refuses two processes on one GPU


class WeightSync:
    """A channel that sends the weights of one model to its sinks, and checks that they have arrived."""

    def __init__(
        self,
        source: WeightSource,
        sinks: Mapping[str, WeightSink],
        options: SyncOptions = SyncOptions(),
        *,
        find_address: Callable[[], Awaitable[str]] | None = None,
        kind: SyncKind = "full",
        dtype: torch.dtype | None = None,
        holding_devices: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """Connect the source to its sinks, by name. `transport="shared"` requires them in one process.

        `find_address` returns a free "host:port" of the source's rank 0, which is on this machine by default. If the
        source has an adapter, sinks that have it as well take the kind `adapter`, sinks with a `WeightMirror`
        `factors`, and others `full`. Factors are preceded by the base where sinks do not hold it. Whole models travel
        in `dtype`, that of the sinks, where it is smaller. A sync runs inside `holding_devices()`, which brings the
        weights of source and sinks to devices that they share with others.
        """
        self._source = source
        self._sinks = dict(sinks)
        self._options = options
        self._find_address = find_address or _local_address
        self._kind: SyncKind = kind
        self._dtype = dtype
        self._holding_devices = holding_devices
        self.recover: Callable[[], Awaitable[bool]] | None = None
        """Called after a failed sync to replace lost sinks; if it returns True, the weights are sent once more."""
        self._version: int | None = None  # that every sink holds

    async def __call__(self, version: int) -> Metrics:
        """Send the weights to every sink, as those of `version`. Sinks must be idle or paused.

        Raises:
            SyncError: a sink received different bytes, or none in time.
            EngineError: a sink refused, e.g. because it is asleep.
        """
        async with self._holding_devices():
            receipt = await self._send_to_all(version)
        self._version = version
        if self._options.transport == "shared":
            return Metrics()
        n_copies = sum(sink.n_weight_copies for sink in self._sinks.values())
        verified = {"sync/verified_copies": n_copies} if self._options.has_checksum else {}
        return Metrics.of({"sync/megabytes": receipt.n_sent / 1e6, **verified})

    async def _send_to_all(self, version: int) -> Receipt:
        """Send the weights to every sink. After a failure, lost sinks are replaced, and all weights sent once more."""
        try:
            return await self._send(self._sinks, version, is_update=True)
        except (EngineError, SyncError):
            if self.recover is None or not await self.recover():
                raise
            return await self._send(self._sinks, version)

    async def send_to(self, name: str, sink: WeightSink, version: int) -> None:
        """Send all weights, as those of `version`, to a sink that replaces another one of this name.

        During an update, they differ from those that the other sinks received as `version`: the next sync sends no
        changes.
        """
        try:
            await self._send({name: sink}, version)
        finally:
            self.forget()  # a sync that ends meanwhile sets the version

    def forget(self) -> None:
        """Send all weights in the next sync: a sink does not hold those of the last one."""
        self._version = None

    async def _send(self, sinks: Mapping[str, WeightSink], version: int, *, is_update: bool = False) -> Receipt:
        """Send all weights or, for an update, what the sinks do not hold yet."""
        held = self._version if is_update else None
        plan = await self._plan(sinks, version, held)
        if held is not None and self._version is None:  # a sink was replaced while the plan was made
            plan = await self._plan(sinks, version)
        self._version = None  # until all sinks hold the new one
        first, plans = 1, {}
        for name, sink in sinks.items():
            plans[name] = replace(plan, rank=first)
            first += sink.n_weight_copies
        if plan.transport == "shared":
            sent = await self._source.send_weights(plan)  # stores the references that the sinks read
            try:
                received = {name: await sink.receive_weights(plans[name]) for name, sink in sinks.items()}
            finally:
                release(plan.address)
        else:
            sending = asyncio.ensure_future(self._source.send_weights(plan))
            receiving = {name: asyncio.ensure_future(sink.receive_weights(plans[name])) for name, sink in sinks.items()}
            tasks = [sending, *receiving.values()]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                first_error = next((error for task in tasks if task.done() and (error := task.exception())), None)
                if first_error is not None:
                    failed = [
                        plans[name].rank  # of a sink with several copies, some may still connect
                        for name, task in receiving.items()
                        if sinks[name].n_weight_copies == 1 and task.done() and task.exception() is not None
                    ]
                    await _end_sender(sending, plan, first_error, failed)
                    raise first_error from first_error.__cause__
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            sent, received = sending.result(), {name: task.result() for name, task in receiving.items()}
        for name, receipt in received.items():
            if receipt != sent:
                raise SyncError(
                    f"weight sync {version} failed: {name} holds other weights than the policy: {receipt} instead of "
                    f"{sent}. {ADVICE}"
                )
        return sent

    async def _plan(self, sinks: Mapping[str, WeightSink], version: int, held: int | None = None) -> SyncPlan:
        """Plan a sync to sinks that hold the version `held`."""
        options = self._options
        needs_base = self._kind == "factors" and (held is None or options.transport == "shared")
        kind: SyncKind = "base_and_factors" if needs_base else self._kind
        if options.transport == "shared":
            address = f"sync-{id(self)}-{version}"
            return SyncPlan(version, "shared", address, timeout_s=options.timeout_s, kind=kind)
        sends_changes = options.sends_changes and self._kind == "full"  # almost all values of an adapter change
        names = ["rank 0 of the model"]
        for name, sink in sinks.items():
            n = sink.n_weight_copies
            names += [name] if n == 1 else [f"{name} (copy {i} of {n})" for i in range(1, n + 1)]
        return SyncPlan(
            version,
            options.transport,
            await self._find_address(),
            split_into_chunks(self._narrow(await self._source.tensor_specs(kind), kind), options.chunk_bytes),
            n_receivers=len(names) - 1,
            timeout_s=options.timeout_s,
            kind=kind,
            chunk_bytes=options.ipc_bytes // N_SLOTS if options.transport == "cuda_ipc" else options.chunk_bytes,
            has_checksum=options.has_checksum,
            tracks_changes=sends_changes,
            base_version=held if sends_changes else None,
            names=tuple(names),
        )

    def _narrow(self, specs: Sequence[TensorSpec], kind: SyncKind) -> Sequence[TensorSpec]:
        """Return the tensors of a model in the type of the sinks, where it is smaller: they would round to it anyway.

        Adapters are not rounded: sinks merge them first.
        """
        dtype = self._dtype
        if dtype is None or kind != "full":
            return specs
        return [
            replace(spec, dtype=dtype)
            if spec.dtype.is_floating_point and spec.dtype.itemsize > dtype.itemsize
            else spec
            for spec in specs
        ]


async def _end_sender(
    sending: asyncio.Future[Receipt], plan: SyncPlan, reason: BaseException, failed: Sequence[int]
) -> None:
    """Call a sync off until the sender has ended: it may not listen yet, and would then wait for the failed ends."""
    deadline = time.monotonic() + plan.timeout_s
    while not sending.done() and time.monotonic() < deadline:
        if await asyncio.to_thread(call_off, plan, reason, failed):
            await asyncio.wait([sending], timeout=LINGER_S)
        else:
            await asyncio.wait([sending], timeout=MAX_POLL_S)


async def _local_address() -> str:
    return f"127.0.0.1:{free_port()}"


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
