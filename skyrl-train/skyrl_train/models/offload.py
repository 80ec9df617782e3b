"""Offloading: release the device memory of tensors while their values wait in host memory."""

import ctypes
from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor

BLOCK_BYTES = 1 << 26  # PyTorch rounds pinned memory up to a power of two


class OffloadedTensors:
    """Tensors whose values are in host memory while their own memory is released.

    `restore` brings the values back bit for bit. The tensors stay the same objects, and tied weights, views and FSDP2's
    shards share memory again as before. Until then, reading one of them crashes the process.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Release the memory of all tensors on this type of device, except files mapped into memory.

        If the host has too little memory, raise RuntimeError and release nothing.
        """
        self._device = device
        self._is_pinned = device.type == "cuda"
        _synchronize(device)  # other streams may still write
        storages = {}  # distinct ones, by address
        for tensor in tensors:
            local = tensor.detach()
            storage = (local.to_local() if isinstance(local, DTensor) else local).untyped_storage()
            if storage.device.type == device.type and storage.nbytes() and storage.resizable():
                storages[storage.data_ptr()] = storage
        copies = []
        rest = torch.empty(0, dtype=torch.uint8)  # free end of the last block of host memory
        for storage in storages.values():
            pieces: list[torch.Tensor] = []
            while n_missing := storage.nbytes() - sum(map(len, pieces)):
                if not len(rest):
                    rest = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._is_pinned)
                pieces.append(rest[:n_missing])
                rest = rest[n_missing:]
            for piece, values in _pair(pieces, storage):
                piece.copy_(values, non_blocking=self._is_pinned)
            copies.append((storage, pieces))
        _synchronize(device)
        self.n_bytes = sum(storage.nbytes() for storage, _ in copies)  # released, read before the sizes become 0
        for storage, _ in copies:
            storage.resize_(0)
        self._copies = copies

    def restore(self) -> None:
        """Allocate the memory of the tensors and copy their values back.

        Raise RuntimeError if the device has too little memory. Call it again to continue.
        """
        while self._copies:
            storage, pieces = self._copies[-1]
            storage.resize_(sum(map(len, pieces)))
            for piece, values in _pair(pieces, storage):
                values.copy_(piece, non_blocking=self._is_pinned)
            self._copies.pop()
        _synchronize(self._device)


MIN_ACTIVATION_BYTES = 1 << 20
"""Smaller activations stay on the device."""


def activations_in_host_memory(module: torch.nn.Module) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context for a forward pass whose saved activations wait in host memory for the backward pass.

    With gradient checkpointing, these are the inputs of the layers. The module's weights stay on the device. Copies run
    in the order of the device's stream, so neither pass waits for them on the CPU.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        if tensor.nbytes < MIN_ACTIVATION_BYTES or tensor.untyped_storage().data_ptr() in weights:
            return lambda: tensor
        device, is_pinned = tensor.device, tensor.is_cuda
        host = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned, memory_format=torch.contiguous_format)
        host.copy_(tensor, non_blocking=is_pinned)
        return lambda: host.to(device, non_blocking=is_pinned)

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda unpack: unpack())


def release_cached_memory(device: torch.device) -> None:
    """Give memory that was freed, but kept for later allocations, back to the device."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()  # memory that receivers of a weight sync have released
        torch.cuda.empty_cache()
    else:
        release_heap()


class _HeapInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc. `fordblks` counts the free bytes of the heap."""

    _fields_ = [("others", 8 * ctypes.c_size_t), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


def count_kept_bytes() -> int:
    """Return the memory that was freed on the CPU but is kept in glibc's heap. Other allocators are not asked."""
    library = ctypes.CDLL(None)
    if not (hasattr(library, "malloc_trim") and hasattr(library, "mallinfo2")):
        return 0
    library.mallinfo2.restype = _HeapInfo
    return int(library.mallinfo2().fordblks)


def release_heap() -> None:
    """Give the memory that is kept in glibc's heap back to the system.

    After an update, it consists of gaps that the next update's activations do not fit. Giving it back takes 0.1 s per
    GB, and the next allocations take two to three times that longer.
    """
    if count_kept_bytes():
        ctypes.CDLL(None).malloc_trim(0)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _pair(pieces: list[torch.Tensor], storage: torch.UntypedStorage) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return each piece with its bytes of the storage, in order."""
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return zip(pieces, content.split(list(map(len, pieces))), strict=True)
