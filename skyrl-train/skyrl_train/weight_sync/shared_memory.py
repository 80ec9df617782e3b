"""Memory that processes of one user on one machine share. It has no name in any file system."""

from __future__ import annotations

import mmap
import os
import secrets
from typing import Final

import torch

NAME: Final = "skyrl-weights"


class SharedMemory:
    """A block of memory, which the kernel frees when the last process that uses it closes it or is killed."""

    def __init__(self, fd: int, size: int, address: str) -> None:
        """Map an open file; use `create` or `open_memory`."""
        self.address = address
        self._fd = fd
        self.buffer = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)  # (size,)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """Allocate memory. Other processes open it by its `address` for as long as this object exists."""
        name = f"{NAME}-{secrets.token_hex(8)}"
        fd = os.memfd_create(name)
        try:
            os.ftruncate(fd, size)
            return cls(fd, size, f"{os.getpid()}/{fd}/{name}")
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the file; the mapping ends with the last tensor of `buffer`."""
        os.close(self._fd)


def can_share_memory() -> bool:
    """Return True if this system has memory without a name."""
    return hasattr(os, "memfd_create")


def open_memory(address: str) -> SharedMemory | None:
    """Return the memory at an address; None if its process runs on another machine or belongs to another user."""
    process, _, rest = address.partition("/")
    number, _, name = rest.partition("/")
    path = f"/proc/{process}/fd/{number}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{name}"):  # a process of the same number on another machine
            return None
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return SharedMemory(fd, os.fstat(fd).st_size, address)
    except BaseException:
        os.close(fd)
        raise
