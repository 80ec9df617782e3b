"""A checksum of tensors that notices values that changed, and values that changed places."""

from __future__ import annotations

import zlib

import torch

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20


def tensor_checksum(name: str, tensor: torch.Tensor) -> int:
    """Return Σ (2i + 1) · (bitsᵢ + c) mod 2⁶⁴ over the tensor's values in order, with c of its name.

    The checksums of a model's tensors add up, modulo 2⁶⁴, in any order.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    offset = zlib.crc32(name.encode())
    total = 0
    for start in range(0, len(bits), _CHUNK):
        values = bits[start : start + _CHUNK].to(torch.int64) + offset
        odd = 2 * torch.arange(start, start + len(values), device=bits.device) + 1
        total += int((odd * values).sum())  # wraps around at 2⁶⁴, as it should
    return total % 2**64
