"""GPU memory that several processes on the same GPU share through CUDA IPC."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

HandleField = bytes | int | bool


class CudaMemory:
    """A block of GPU memory. CUDA frees it once every process that uses it has dropped `buffer` or ended."""

    def __init__(self, buffer: torch.Tensor, address: str) -> None:
        """Use `create` or `open_cuda_memory`."""
        self.buffer = buffer  # (size,) uint8
        self.address = address

    @classmethod
    def create(cls, size: int, device: torch.device) -> CudaMemory:
        """Allocate memory. Other processes open it by its `address` for as long as `buffer` exists."""
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        _, (*_, handle, n_bytes, offset, _, counter, counter_offset, event, needs_event) = reduce_tensor(buffer)
        fields = (handle, n_bytes, offset, counter, counter_offset, event, needs_event)
        return cls(buffer, encode_handle(fields))

    def close(self) -> None:
        """Do nothing: the memory lives as long as `buffer`."""


def open_cuda_memory(address: str, device: torch.device) -> CudaMemory:
    """Return the memory at an address. `device` is the memory's GPU, under its index in this process."""
    handle, n_bytes, offset, counter, counter_offset, event, needs_event = decode_handle(address)
    buffer = rebuild_cuda_tensor(
        torch.Tensor,
        (n_bytes,),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        device.index,
        *(handle, n_bytes, offset, False, counter, counter_offset, event, needs_event),
    )
    return CudaMemory(buffer, address)


def encode_handle(fields: Sequence[HandleField]) -> str:
    """Encode a handle as JSON, so that the receiver never unpickles data from another process."""
    return json.dumps([base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in fields])


def decode_handle(text: str) -> list[HandleField]:
    """Decode the fields of a handle from `encode_handle`."""
    return [base64.b64decode(x) if isinstance(x, str) else x for x in json.loads(text)]
