"""Memory that processes share: of one machine, or of one GPU through CUDA IPC.

No file system lists it, so nothing is left behind.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import Final

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

NAME: Final = "skyrl-weights"
CPU = torch.device("cpu")

HandleField = bytes | int | bool


class SharedMemory:
    """A block of memory. It is freed once every process that uses it has dropped `buffer` or ended."""

    def __init__(self, buffer: torch.Tensor, address: str, fd: int | None = None) -> None:
        """Use `create` or `open_memory` instead. `fd` is the file of host memory."""
        self.buffer = buffer  # (size,) uint8
        self.address = address
        self._fd = fd

    @classmethod
    def create(cls, size: int, device: torch.device = CPU) -> SharedMemory:
        """Allocate memory. Other processes of this user open it by its `address` for as long as this object exists."""
        if device.type == "cuda":
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            _, (*_, handle, n_bytes, offset, _, counter, counter_offset, event, needs_event) = reduce_tensor(buffer)
            fields = (handle, n_bytes, offset, counter, counter_offset, event, needs_event)
            return cls(buffer, encode_handle(fields))
        name = f"{NAME}-{secrets.token_hex(8)}"
        fd = os.memfd_create(name)
        try:
            os.ftruncate(fd, size)
            return cls(_map(fd, size), f"{os.getpid()}/{fd}/{name}", fd)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the file. The memory stays until the last tensor on `buffer` is gone."""
        if self._fd is not None:
            os.close(self._fd)


def can_share_memory() -> bool:
    """Return True if this system has anonymous memory files (`memfd_create`, Linux)."""
    return hasattr(os, "memfd_create")


def open_memory(address: str, device: torch.device = CPU) -> SharedMemory | None:
    """Return the memory at an address, or None if its process is on another machine or GPU, or of another user.

    `device` is the memory's device, under its index in this process.
    """
    if device.type == "cuda":
        handle, n_bytes, offset, *shared = decode_handle(address)
        try:
            buffer = rebuild_cuda_tensor(
                *(torch.Tensor, (n_bytes,), (1,), 0, torch.storage.TypedStorage, torch.uint8, device.index),
                *(handle, n_bytes, offset, False, *shared),
            )
        except RuntimeError:  # CUDA's error for memory of another GPU or container
            return None
        return SharedMemory(buffer, address)
    process, _, rest = address.partition("/")
    number, _, name = rest.partition("/")
    path = f"/proc/{process}/fd/{number}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{name}"):  # another machine's process has the same id here
            return None
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return SharedMemory(_map(fd, os.fstat(fd).st_size), address, fd)
    except BaseException:
        os.close(fd)
        raise


def _map(fd: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)


def encode_handle(fields: Sequence[HandleField]) -> str:
    """Encode the handle of GPU memory as JSON, so that the receiver never unpickles data from another process."""
    return json.dumps([base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in fields])


def decode_handle(text: str) -> list[HandleField]:
    """Decode the fields of a handle from `encode_handle`."""
    return [base64.b64decode(x) if isinstance(x, str) else x for x in json.loads(text)]
