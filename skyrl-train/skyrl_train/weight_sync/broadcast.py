"""Weight sync between processes: rank 0 of the model broadcasts chunks of tensors through gloo.

Each sync connects anew, so an engine that was replaced in the meantime needs no special care.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from skyrl_train.errors import SyncError
from skyrl_train.types.specs import TensorSpec
from skyrl_train.weight_sync.base import Receipt, SyncPlan
from skyrl_train.weight_sync.checksum import tensor_checksum


class BroadcastSender:
    """Sends from rank 0; the other ranks only take part in gathering."""

    def send(self, plan: SyncPlan, tensors: Iterator[tuple[str, torch.Tensor]]) -> Receipt:
        """See `Sender.send`.

        Raises:
            SyncError: the model's tensors are not those of the plan, or a receiver did not answer in time.
        """
        is_sender = not dist.is_initialized() or dist.get_rank() == 0
        if not is_sender:
            for _ in tensors:
                pass
            return Receipt(plan.version, 0)
        group = _connect(plan)
        checksum, n_bytes = 0, 0
        for chunk in plan.chunks:
            buffer = torch.empty(sum(spec.n_bytes for spec in chunk), dtype=torch.uint8)
            start = 0
            for spec in chunk:
                name, tensor = next(tensors)
                if name != spec.name or tuple(tensor.shape) != spec.shape:
                    raise SyncError(f"the model has {name} {tuple(tensor.shape)} where the plan has {spec}")
                tensor = tensor.to("cpu", spec.dtype)
                checksum += tensor_checksum(name, tensor)
                buffer[start : start + spec.n_bytes] = tensor.contiguous().reshape(-1).view(torch.uint8)
                start += spec.n_bytes
            _broadcast(group, buffer, plan)
            n_bytes += len(buffer)
        return Receipt(plan.version, n_bytes, checksum % 2**64)


class BroadcastReceiver:
    """Receives in a process of its own."""

    receipt: Receipt

    def receive(self, plan: SyncPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Receiver.receive`.

        Raises:
            SyncError: the sender did not answer in time.
        """
        group = _connect(plan)
        checksum, n_bytes = 0, 0
        for chunk in plan.chunks:
            buffer = torch.empty(sum(spec.n_bytes for spec in chunk), dtype=torch.uint8)
            _broadcast(group, buffer, plan)
            n_bytes += len(buffer)
            start = 0
            for spec in chunk:
                tensor = buffer[start : start + spec.n_bytes].view(spec.dtype).view(spec.shape)
                start += spec.n_bytes
                checksum += tensor_checksum(spec.name, tensor)
                yield spec.name, tensor
        self.receipt = Receipt(plan.version, n_bytes, checksum % 2**64)


def chunked(specs: list[TensorSpec], chunk_bytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """Divide tensors, in order, into chunks of at most `chunk_bytes`; a larger tensor has a chunk of its own."""
    chunks: list[list[TensorSpec]] = []
    size = 0
    for spec in specs:
        if not chunks or size + spec.n_bytes > chunk_bytes:
            chunks.append([])
            size = 0
        chunks[-1].append(spec)
        size += spec.n_bytes
    return tuple(tuple(chunk) for chunk in chunks)


def call_off(plan: SyncPlan) -> None:
    """Release the ends that wait for a receiver that has failed before it connected."""
    _store(plan, is_master=False, timeout_s=10).set("failed", "1")


def _connect(plan: SyncPlan) -> dist.ProcessGroupGloo:
    try:
        store = _store(plan, is_master=plan.rank == 0, timeout_s=plan.timeout_s)
        store.set(f"ready/{plan.rank}", "1")
        everybody = [f"ready/{rank}" for rank in range(plan.n_receivers + 1)]
        deadline = time.monotonic() + plan.timeout_s
        while not store.check(everybody):
            if store.check(["failed"]):
                raise SyncError(f"weight sync {plan.version} was called off: another end of it has failed")
            if time.monotonic() > deadline:
                raise SyncError(f"weight sync {plan.version}: not every end connected in {plan.timeout_s:g} s")
            time.sleep(0.005)
        timeout = timedelta(seconds=plan.timeout_s)
        return dist.ProcessGroupGloo(store, plan.rank, plan.n_receivers + 1, timeout)
    except (RuntimeError, dist.DistError) as error:
        raise SyncError(f"weight sync {plan.version} could not connect at {plan.address}: {error}") from error


def _store(plan: SyncPlan, *, is_master: bool, timeout_s: float) -> dist.TCPStore:
    host, _, port = plan.address.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, int(port), is_master=is_master, timeout=timeout, wait_for_workers=False)


def _broadcast(group: dist.ProcessGroupGloo, buffer: torch.Tensor, plan: SyncPlan) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    try:
        group.broadcast([buffer], options).wait()  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise SyncError(f"weight sync {plan.version} broke off at {plan.address}: {error}") from error
