"""The memory of tensors, released on their device while their values are in host memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

BLOCK_BYTES = 1 << 26  # a power of two, to which PyTorch rounds pinned memory up


class OffloadedTensors:
    """Tensors whose values are in host memory, while the memory of the tensors themselves is released.

    `restore` undoes it, bit for bit. The tensors stay the same objects, and what shares their memory shares it again
    afterwards: tied weights, views, the shards of FSDP2. Until then, reading them crashes the process.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Release the memory of the tensors that are on this kind of device, except that of files mapped into memory.

        Raises:
            RuntimeError: the host has too little memory. Nothing is released.
        """
        self._device = device
        self._is_pinned = device.type == "cuda"
        _synchronize(device)  # other streams may still write
        host = _HostMemory(is_pinned=self._is_pinned)
        copies = []
        for storage in _storages(tensors, device):
            pieces = host.take(storage.nbytes())
            for piece, values in _pair(pieces, storage):
                piece.copy_(values, non_blocking=self._is_pinned)
            copies.append((storage, pieces))
        _synchronize(device)
        self.n_bytes = sum(storage.nbytes() for storage, _ in copies)  # that are released
        for storage, _ in copies:
            storage.resize_(0)
        self._copies = copies

    def restore(self) -> None:
        """Allocate the memory of the tensors and copy their values back. It may be called again after an error.

        Raises:
            RuntimeError: the device has too little memory.
        """
        while self._copies:
            storage, pieces = self._copies[-1]
            storage.resize_(sum(map(len, pieces)))
            for piece, values in _pair(pieces, storage):
                values.copy_(piece, non_blocking=self._is_pinned)
            self._copies.pop()
        _synchronize(self._device)


class _HostMemory:
    """Host memory in blocks, of which tensors take pieces."""

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._rest = torch.empty(0, dtype=torch.uint8)  # of the last block

    def take(self, n_bytes: int) -> list[torch.Tensor]:
        """Return consecutive pieces (n,) of `n_bytes` in all."""
        pieces = []
        while n_bytes > 0:
            if not len(self._rest):
                self._rest = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._is_pinned)
            pieces.append(self._rest[:n_bytes])
            self._rest = self._rest[n_bytes:]
            n_bytes -= len(pieces[-1])
        return pieces


def release_cached_memory(device: torch.device) -> None:
    """Return the memory that PyTorch keeps for later tensors to the device, where other processes can use it."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()  # of memory that receivers of a weight sync no longer use
        torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Return the distinct memory of those tensors that are on a kind of device and whose memory can be released."""
    storages = {}
    for tensor in tensors:
        local = tensor.detach()
        storage = (local.to_local() if isinstance(local, DTensor) else local).untyped_storage()
        if storage.device.type == device.type and storage.nbytes() and storage.resizable():
            storages[storage.data_ptr()] = storage
    return list(storages.values())


def _pair(pieces: list[torch.Tensor], storage: torch.UntypedStorage) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return each piece with the bytes of the storage that belong to it."""
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return zip(pieces, content.split(list(map(len, pieces))), strict=True)
