"""Weight sync from end to end: from a model to everything that holds a copy of its weights."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Protocol

import torch

from skyrl_train.errors import EngineError, SyncError
from skyrl_train.types import Metrics
from skyrl_train.types.specs import SyncKind, TensorSpec
from skyrl_train.weight_sync.base import Receipt, SyncPlan, Transport
from skyrl_train.weight_sync.rendezvous import LINGER_S, MAX_POLL_S, call_off
from skyrl_train.weight_sync.stream import N_SLOTS
from skyrl_train.weight_sync.transfer import SHARED

ADVICE = "Training on its samples would be wrong; rerun the command to resume from the last checkpoint"


class WeightSource(Protocol):
    """A model that sends its weights: a `WorkerGroup`."""

    async def tensor_specs(self, kind: SyncKind) -> list[TensorSpec]:
        """Return the tensors that a sync of this kind sends."""

    async def send_weights(self, plan: SyncPlan) -> Receipt:
        """Send the weights according to `plan`."""


class WeightSink(Protocol):
    """A holder of a copy: an `InferenceEngine`, or a `WorkerGroup`."""

    @property
    def n_weight_copies(self) -> int:
        """Number of processes that receive weights, each as a separate receiver."""

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        """Receive weights, as the receivers with ranks from `plan.rank` on."""


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """Settings of a weight sync."""

    transport: Transport = "shared"
    prefers_gpus: bool = False  # `auto` sends from GPU to GPU if both ends are on GPUs
    chunk_bytes: int = 1 << 24  # size of a piece of the stream
    ipc_bytes: int = 10**9  # memory on each GPU for all slots of `cuda_ipc`
    timeout_s: float = 300.0
    has_checksum: bool = True
    sends_changes: bool = False  # send only changes since the last sync, for tensors where that is shorter


@dataclass(eq=False)
class WeightSync:
    """A channel that sends the weights of one model to its sinks, and checks that they have arrived."""

    source: WeightSource
    sinks: Mapping[str, WeightSink]
    """The holders of copies, by name. `transport="shared"` needs all of them in this process."""
    options: SyncOptions = SyncOptions()
    _: KW_ONLY
    find_address: Callable[[], Awaitable[str]] | None = None
    """Returns a free "host:port" where the source's rank 0 can listen, by default on this machine."""
    kind: SyncKind = "full"
    """`full` sends merged weights. If the source has an adapter, `adapter` is for sinks that also have it, and
    `factors` for sinks with a `WeightMirror`. The base is sent before the factors if a sink lacks it."""
    dtype: torch.dtype | None = None
    """Dtype of the sinks. A whole model is sent in it if it is smaller."""
    holding_devices: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """Context of a sync. It brings the weights of source and sinks to their devices, if they share these with other
    models."""
    recover: Callable[[], Awaitable[bool]] | None = None
    """Called after a failed sync to replace lost sinks. If it returns True, the weights are sent once more."""
    _version: int | None = field(default=None, init=False)  # version that every sink holds, if known

    async def __call__(self, version: int) -> Metrics:
        """Send the weights to every sink as `version`. Sinks must be idle or paused.

        Raises:
            SyncError: a sink received different bytes, or none in time.
            EngineError: a sink rejected the sync, e.g. because it is asleep.
        """
        async with self.holding_devices():
            try:
                receipt = await self._send(self.sinks, version, is_update=True)
            except (EngineError, SyncError):
                if self.recover is None or not await self.recover():
                    raise
                receipt = await self._send(self.sinks, version)
        self._version = version
        if self.options.transport == "shared":
            return Metrics()
        n_copies = sum(sink.n_weight_copies for sink in self.sinks.values())
        verified = {"sync/verified_copies": n_copies} if self.options.has_checksum else {}
        return Metrics.of({"sync/megabytes": receipt.n_sent / 1e6, **verified})

    async def send_to(self, name: str, sink: WeightSink, version: int) -> None:
        """Send all weights as `version` to a new sink that replaces the previous sink of this name.

        During an update, these weights already differ from the ones other sinks received as `version`, so the next sync
        sends whole weights instead of changes.
        """
        try:
            await self._send({name: sink}, version)
        finally:
            self.forget()  # a sync that ended meanwhile has set the version

    def forget(self) -> None:
        """Make the next sync send all weights, because a sink does not hold the last version."""
        self._version = None

    async def _send(self, sinks: Mapping[str, WeightSink], version: int, *, is_update: bool = False) -> Receipt:
        """Send all weights, or for an update only what the sinks do not hold yet."""
        held = self._version if is_update else None
        plan = await self._plan(sinks, version, held)
        if held is not None and self._version is None:  # a sink was replaced during the await
            plan = await self._plan(sinks, version)
        self._version = None  # until all sinks hold the new version
        first, plans = 1, {}
        for name, sink in sinks.items():
            plans[name] = replace(plan, rank=first)
            first += sink.n_weight_copies
        if plan.transport == "shared":
            sent = await self.source.send_weights(plan)  # stores the references that the sinks read
            try:
                received = {name: await sink.receive_weights(plans[name]) for name, sink in sinks.items()}
            finally:
                SHARED.pop(plan.address, None)
        else:
            sending = asyncio.ensure_future(self.source.send_weights(plan))
            receiving = {name: asyncio.ensure_future(sink.receive_weights(plans[name])) for name, sink in sinks.items()}
            tasks = [sending, *receiving.values()]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                first_error = next((error for task in tasks if task.done() and (error := task.exception())), None)
                if first_error is not None:
                    failed = [
                        plans[name].rank  # sinks with several copies are not listed: some may still connect
                        for name, task in receiving.items()
                        if sinks[name].n_weight_copies == 1 and task.done() and task.exception() is not None
                    ]
                    deadline = time.monotonic() + plan.timeout_s  # keep trying: the sender may not be listening yet
                    while not sending.done() and time.monotonic() < deadline:
                        is_listening = await asyncio.to_thread(call_off, plan, first_error, failed)
                        await asyncio.wait([sending], timeout=LINGER_S if is_listening else MAX_POLL_S)
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
        options = self.options
        needs_base = self.kind == "factors" and (held is None or options.transport == "shared")
        kind: SyncKind = "base_and_factors" if needs_base else self.kind
        if options.transport == "shared":
            address = f"sync-{id(self)}-{version}"
            return SyncPlan(version, "shared", address, timeout_s=options.timeout_s, kind=kind)
        sends_changes = options.sends_changes and self.kind == "full"  # almost all values of an adapter change
        specs, dtype = await self.source.tensor_specs(kind), self.dtype
        if dtype is not None and kind == "full":  # sinks would round to it anyway, but merge adapters first
            specs = [
                replace(spec, dtype=dtype)
                if spec.dtype.is_floating_point and spec.dtype.itemsize > dtype.itemsize
                else spec
                for spec in specs
            ]
        names = ["rank 0 of the model"]
        for name, sink in sinks.items():
            n = sink.n_weight_copies
            names += [name] if n == 1 else [f"{name} (copy {i} of {n})" for i in range(1, n + 1)]
        return SyncPlan(
            version,
            options.transport,
            f"127.0.0.1:{free_port()}" if self.find_address is None else await self.find_address(),
            tuple(specs),
            n_receivers=len(names) - 1,
            timeout_s=options.timeout_s,
            kind=kind,
            chunk_bytes=options.ipc_bytes // N_SLOTS if options.transport == "cuda_ipc" else options.chunk_bytes,
            has_checksum=options.has_checksum,
            tracks_changes=sends_changes,
            base_version=held if sends_changes else None,
            names=tuple(names),
        )


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port on this machine."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
