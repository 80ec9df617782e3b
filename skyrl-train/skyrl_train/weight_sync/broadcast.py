"""Weight sync between processes: rank 0 of the model broadcasts chunks of tensors through gloo.

Each sync opens new connections, so a replaced engine needs no special care.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Generator, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from skyrl_train.errors import SyncError
from skyrl_train.types.specs import TensorSpec
from skyrl_train.weight_sync.base import Receipt, SyncPlan

logger = logging.getLogger(__name__)

INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per value
CHECKSUM_CHUNK = 1 << 20  # values


def send_broadcast(plan: SyncPlan, tensors: Iterator[tuple[str, torch.Tensor]]) -> Receipt:
    """Send the tensors in the order of the plan from rank 0; the other ranks only help to gather them.

    Raises:
        SyncError: the model's tensors are not those of the plan, or a receiver did not answer in time.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        for _ in tensors:
            pass
        return Receipt(plan.version, 0)
    group = _connect(plan)
    checksum, n_bytes = 0, 0
    for chunk in plan.chunks:
        buffer = torch.empty(sum(spec.n_bytes for spec in chunk), dtype=torch.uint8)
        start = 0
        for spec in chunk:
            name, tensor = next(tensors, ("no tensor", torch.empty(0)))
            if name != spec.name or tuple(tensor.shape) != spec.shape:
                raise SyncError(f"the model has {name} {tuple(tensor.shape)} where the plan has {spec}")
            tensor = tensor.to("cpu", spec.dtype)
            checksum += tensor_checksum(name, tensor)
            buffer[start : start + spec.n_bytes] = tensor.contiguous().reshape(-1).view(torch.uint8)
            start += spec.n_bytes
        _broadcast(group, buffer, plan)
        n_bytes += len(buffer)
    return Receipt(plan.version, n_bytes, checksum % 2**64)


def receive_broadcast(plan: SyncPlan) -> Generator[tuple[str, torch.Tensor], None, Receipt]:
    """Yield the tensors, which are views of a buffer, in a separate process.

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
    return Receipt(plan.version, n_bytes, checksum % 2**64)


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


def tensor_checksum(name: str, tensor: torch.Tensor) -> int:
    """Return Σ (2i + 1) · (bitsᵢ + c) mod 2⁶⁴ over the tensor's values in order, where c is a checksum of its name.

    It detects changed and swapped values. The checksums of a model's tensors add up, modulo 2⁶⁴, in any order.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(INT_OF_SIZE[tensor.element_size()])
    offset = zlib.crc32(name.encode())
    total = 0
    for start in range(0, len(bits), CHECKSUM_CHUNK):
        values = bits[start : start + CHECKSUM_CHUNK].to(torch.int64) + offset
        odd = 2 * torch.arange(start, start + len(values), device=bits.device) + 1
        total += int((odd * values).sum())  # wraps around at 2⁶⁴, as intended
    return total % 2**64


def call_off(plan: SyncPlan) -> None:
    """Release the ends that wait for another end that failed before it connected."""
    try:
        _store(plan, is_master=False, timeout_s=10).set("failed", "1")
    except (RuntimeError, dist.DistError) as error:
        logger.warning("Weight sync %d could not be called off: %s", plan.version, error)


def _connect(plan: SyncPlan) -> dist.ProcessGroupGloo:
    try:
        store = _store(plan, is_master=plan.rank == 0, timeout_s=plan.timeout_s)
        store.set(f"ready/{plan.rank}", "1")
        all_ends = [f"ready/{rank}" for rank in range(plan.n_receivers + 1)]
        deadline = time.monotonic() + plan.timeout_s
        while not store.check(all_ends):
            if store.check(["failed"]):
                raise SyncError(f"weight sync {plan.version} was called off: another end has failed")
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
