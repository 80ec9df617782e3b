"""Memory that processes of one user on one machine share. No file system lists it, so nothing is left behind."""

from __future__ import annotations

import mmap
import os
import secrets
from typing import Final

import torch

NAME: Final = "skyrl-weights"


class SharedMemory:
    """A block of memory. The kernel frees it once every process that uses it has closed it or was killed."""

    def __init__(self, fd: int, size: int, address: str) -> None:
        """Map an open file. Use `create` or `open_memory` instead."""
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
        """Close the file. The memory stays mapped until the last tensor on `buffer` is gone."""
        os.close(self._fd)


def can_share_memory() -> bool:
    """Return True if this system has anonymous memory files (`memfd_create`, Linux)."""
    return hasattr(os, "memfd_create")


def open_memory(address: str) -> SharedMemory | None:
    """Return the memory at an address, or None if its process runs on another machine or as another user."""
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
        return SharedMemory(fd, os.fstat(fd).st_size, address)
    except BaseException:
        os.close(fd)
        raise
