"""The memory of tensors, released on their device while their values are in host memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


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
        is_gpu = device.type == "cuda"
        _synchronize(device)  # other streams may still write
        copies = []
        for storage in _storages(tensors, device):
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_gpu)
            copies.append((storage, copy.copy_(_as_bytes(storage), non_blocking=is_gpu)))
        _synchronize(device)
        for storage, _ in copies:
            storage.resize_(0)
        self._copies = copies
        self.n_bytes = sum(len(copy) for _, copy in copies)  # that were released

    def restore(self) -> None:
        """Allocate the memory of the tensors and copy their values back. It may be called again after an error.

        Raises:
            RuntimeError: the device has too little memory.
        """
        while self._copies:
            storage, copy = self._copies[-1]
            storage.resize_(len(copy))
            _as_bytes(storage).copy_(copy, non_blocking=copy.is_pinned())
            self._copies.pop()
        _synchronize(self._device)


def release_cached_memory(device: torch.device) -> None:
    """Return the memory that PyTorch keeps for later tensors to the device, where other processes can use it."""
    if device.type == "cuda":
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


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the content of a storage as a tensor (n,) with the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
