"""The two ends of a transfer: `send` writes the tensors of a plan to a stream, and a `Receiver` reads them."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from skyrl_train.errors import SyncError
from skyrl_train.models.checksum import Checksum, flat_bytes, split_into_blocks, tensor_checksum
from skyrl_train.threads import half_of_cores
from skyrl_train.types.specs import TensorSpec
from skyrl_train.weight_sync.base import Receipt, SyncPlan
from skyrl_train.weight_sync.stream import StreamReader, StreamWriter

INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per value
MAX_GAP = 256
WHOLE = -1  # sent instead of the number of changes, before a whole tensor


class Changes(NamedTuple):
    """Exact difference between two versions of a tensor: the new bits of the values that changed.

    A change is stored as its distance from the previous change, in one byte, and its new bits. If two changes are more
    than 256 values apart, some unchanged values between them are also sent.
    """

    gaps: torch.Tensor  # (n,) uint8: distance from the previous value, minus 1
    bits: torch.Tensor  # (n,) integers of the size of a value

    @property
    def n_bytes(self) -> int:
        """Size of both parts."""
        return self.gaps.nbytes + self.bits.nbytes

    def apply(self, bits: torch.Tensor) -> None:
        """Set the values in the old bits (N,), in place."""
        positions = (self.gaps.long() + 1).cumsum(0) - 1
        bits[positions.to(bits.device)] = self.bits.to(bits.device)


def find_changes(old: torch.Tensor, new: torch.Tensor) -> Changes:
    """Return the changes from old to new bits (N,).

    >>> find_changes(old=torch.tensor([1, 2, 3, 4]), new=torch.tensor([1, 9, 3, 8]))  # positions 1 and 3, after -1
    Changes(gaps=tensor([1, 1], dtype=torch.uint8), bits=tensor([9, 8]))
    """
    positions = (old != new).nonzero().squeeze(1)
    gaps = positions.diff(prepend=positions.new_full((1,), -1))  # at least 1
    n_steps = (gaps - 1) // MAX_GAP + 1
    steps = torch.full((int(n_steps.sum()),), MAX_GAP, dtype=torch.int64, device=new.device)
    steps[n_steps.cumsum(0) - 1] = gaps - MAX_GAP * (n_steps - 1)
    return Changes((steps - 1).to(torch.uint8), new[steps.cumsum(0) - 1])


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View the values of a contiguous tensor as integers (N,), without a copy."""
    return tensor.detach().view(-1).view(INT_OF_SIZE[tensor.element_size()])


class SentWeights:
    """A copy of the weights that the last sync sent, so that the next sync can send only changes."""

    def __init__(self) -> None:
        self.version: int | None = None  # of the whole copy, None while it is incomplete
        self._bits: dict[str, torch.Tensor] = {}

    def check(self, plan: SyncPlan) -> None:
        """Raise SyncError if a plan sends changes since a version other than this copy's."""
        if plan.base_version is not None and plan.base_version != self.version:
            raise SyncError(
                f"weight sync {plan.version} sends the changes since version {plan.base_version}, but the sender has "
                f"kept version {self.version}; send all weights first"
            )
        self.version = None

    def replace(self, name: str, tensor: torch.Tensor) -> Changes | None:
        """Replace the copy of a tensor, and return its changes since the previous copy, or None without one."""
        new, old = bits_of(tensor), self._bits.get(name)
        if old is None or old.shape != new.shape or old.dtype != new.dtype:
            self._bits[name] = new.clone()
            return None
        changes = find_changes(old, new)
        old.copy_(new)
        return changes


SHARED: dict[str, list[tuple[str, torch.Tensor]]] = {}
"""Tensors of syncs within this process, passed by reference, by the address of their plan."""


def send(
    plan: SyncPlan, tensors: Iterator[tuple[str, torch.Tensor]], sent_weights: SentWeights | None = None
) -> Receipt:
    """Send tensors in the order of the plan. Call it on every rank of the model.

    Iterating over `tensors` gathers them from all ranks, so every rank iterates to the end, even after an error. Only
    rank 0 sends. With `cuda_ipc`, all ranks write the stream, each into memory of its GPU. A plan that `tracks_changes`
    needs the `sent_weights` of the previous call, and updates them. Raise SyncError if the tensors differ from the
    plan, or a receiver fails or does not answer in time.
    """
    if plan.transport == "shared":
        SHARED[plan.address] = list(tensors)
        return _shared_receipt(plan)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        if not is_first and plan.transport != "cuda_ipc":
            return Receipt(plan.version, 0)
        return _send(plan, tensors, sent_weights, has_checksum=plan.has_checksum and is_first)
    finally:
        for _ in tensors:  # other ranks may still be gathering
            pass


def _shared_receipt(plan: SyncPlan) -> Receipt:
    return Receipt(plan.version, sum(tensor.nbytes for _, tensor in SHARED[plan.address]))


def _send(
    plan: SyncPlan, tensors: Iterator[tuple[str, torch.Tensor]], sent_weights: SentWeights | None, *, has_checksum: bool
) -> Receipt:
    """Write every tensor, or its changes if they are shorter, in the format that `_read` documents."""
    if sent_weights is not None:
        sent_weights.check(plan)
    writer = StreamWriter(plan)
    checksum, n_bytes = 0, 0
    try:
        for spec in plan.specs:
            name, tensor = next(tensors, ("no tensor", torch.empty(0)))
            if name != spec.name or tuple(tensor.shape) != spec.shape:
                raise SyncError(f"the model has {name} {tuple(tensor.shape)} where the plan has {spec}")
            n_bytes += spec.n_bytes
            with half_of_cores():  # the receiver may run on the same machine and uses the other half
                tensor = tensor.detach().to(spec.dtype).contiguous()
                changes = None if sent_weights is None else sent_weights.replace(name, tensor.cpu())
                if plan.base_version is not None and changes is not None and changes.n_bytes < spec.n_bytes:
                    writer.write(flat_bytes(torch.tensor([len(changes.gaps)])))
                    writer.write(changes.gaps)
                    writer.write(flat_bytes(changes.bits))
                    checksum += tensor_checksum(name, tensor) if has_checksum else 0
                    continue
                if plan.base_version is not None:
                    writer.write(flat_bytes(torch.tensor([WHOLE])))
                found = Checksum(name)
                for block in split_into_blocks(flat_bytes(tensor)):
                    writer.write(block)
                    if has_checksum:
                        found.add(block)  # still in a cache
                checksum += found.value
        writer.finish()
    except BaseException as error:
        writer.fail(error)
        raise
    finally:
        writer.close()
    if sent_weights is not None:
        sent_weights.version = plan.version
    return Receipt(plan.version, n_bytes, checksum % 2**64, writer.n_sent)


class Receiver:
    """The receiving end of a plan, in a process that holds a copy of the weights. Iterate over it to receive tensors.

    Each tensor is valid until the next one.
    """

    receipt: Receipt  # set after the last tensor

    def __init__(self, plan: SyncPlan, into: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write tensors straight `into` the receiver's tensors of the same name, shape and dtype, and yield these.

        The receipt's checksum then covers what the receiver holds, not only what it received. A plan with a
        `base_version` needs `into`.
        """
        self._plan = plan
        self._into = into or {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in the order of the plan, and set `receipt` at the end.

        Raise SyncError if the sender fails or does not answer in time.
        """
        plan = self._plan
        if plan.transport == "shared":
            yield from SHARED[plan.address]
            self.receipt = _shared_receipt(plan)
            return
        reader = StreamReader(plan)
        checksum, n_bytes = 0, 0
        try:
            for spec in plan.specs:
                destination = self._into.get(spec.name)
                if destination is not None:
                    matches = destination.dtype == spec.dtype and tuple(destination.shape) == spec.shape
                    destination = destination.detach() if matches and destination.is_contiguous() else None
                found = Checksum(spec.name) if plan.has_checksum else None
                with half_of_cores():
                    tensor = _read(reader, plan, spec, destination, found)
                yield spec.name, tensor
                n_bytes += spec.n_bytes
                if found is not None:
                    with half_of_cores():
                        checksum += found.value if found.n_words else tensor_checksum(spec.name, tensor)
            reader.finish()
        except BaseException as error:
            reason = "it could not load the weights" if isinstance(error, GeneratorExit) else str(error)
            reader.fail(SyncError(f"{plan.name(plan.rank)} stopped receiving: {reason}"))
            reader.close()
            raise
        self.receipt = Receipt(plan.version, n_bytes, checksum % 2**64, reader.n_received)


def _read(
    reader: StreamReader, plan: SyncPlan, spec: TensorSpec, destination: torch.Tensor | None, checksum: Checksum | None
) -> torch.Tensor:
    """Return the next tensor. If it is copied whole, add its bytes to `checksum`.

    A plan without `base_version` has one record per tensor, its bytes. With `base_version`, the first record is the
    number of changes (int64), then come `gaps` and `bits` of `Changes`. If that number is `WHOLE`, the bytes follow.
    """
    if plan.base_version is not None:
        if destination is None:
            raise SyncError(
                f"changes of {spec.name} since version {plan.base_version} arrived, but {plan.name(plan.rank)} has no "
                "such tensor of the same dtype; set generator.weight_sync_delta=false"
            )
        n_changes = int(_read_record(reader, 1, torch.int64))
        if n_changes != WHOLE:
            gaps = _read_record(reader, n_changes, torch.uint8).clone()  # the next record may overwrite it
            Changes(gaps, _read_record(reader, n_changes, INT_OF_SIZE[spec.dtype.itemsize])).apply(bits_of(destination))
            return destination
    if destination is None:
        return _read_record(reader, spec.n_bytes // spec.dtype.itemsize, spec.dtype).view(spec.shape)
    _fill(destination, reader, checksum)
    return destination


def _read_record(reader: StreamReader, n_values: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values (n,) that are valid until the next record, without a copy if they are within one piece."""
    n_bytes = n_values * dtype.itemsize
    if 0 < n_bytes <= reader.n_left:
        (part,) = reader.read(n_bytes)
        return part.view(dtype)
    values = torch.empty(n_values, dtype=dtype, device=reader.device)
    _fill(values, reader)
    return values


def _fill(tensor: torch.Tensor, reader: StreamReader, checksum: Checksum | None = None) -> None:
    """Copy the next record into a contiguous tensor."""
    flat, start = flat_bytes(tensor), 0
    for part in reader.read(len(flat)):
        own = flat[start : start + len(part)]
        start += len(part)
        blocks = split_into_blocks(own)
        for block, values in zip(blocks, part.split([len(block) for block in blocks]), strict=True):
            block.copy_(values)
            if checksum is not None:
                checksum.add(block)  # still in a cache
