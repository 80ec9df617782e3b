"""A checksum of tensors that notices changed and swapped values, and adds up over the tensors of a model."""

from __future__ import annotations

import zlib
from functools import cache

import torch

BLOCK_WORDS = {"cpu": 1 << 15, "cuda": 1 << 22}  # on a CPU, a block and its weights stay in the cache of a core
WORD_BYTES = 8


def tensor_checksum(name: str, tensor: torch.Tensor) -> int:
    """Return Σ (2i + 1) · (wordᵢ + c) mod 2⁶⁴ over the tensor's words of 8 bytes, where c is a checksum of its name.

    The last word is filled up with zeros. The checksums of a model's tensors add up, modulo 2⁶⁴, in any order.
    """
    flat = flat_bytes(tensor)
    if flat.storage_offset() % WORD_BYTES:
        flat = flat.clone()  # words must be aligned
    n_whole = len(flat) // WORD_BYTES * WORD_BYTES
    total = _weighted_sum(flat[:n_whole].view(torch.int64)) if n_whole else 0
    n_words = n_whole // WORD_BYTES
    if len(flat) > n_whole:
        rest = int.from_bytes(bytes(flat[n_whole:].tolist()), "little", signed=False)
        total += (2 * n_words + 1) * rest
        n_words += 1
    return (total + zlib.crc32(name.encode()) * n_words**2) % 2**64  # Σ (2i + 1) = n²


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor (n,) in order, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _weighted_sum(words: torch.Tensor) -> int:
    """Return Σ (2i + 1) · wordᵢ mod 2⁶⁴."""
    weights = _odd_numbers(words.device)
    total = 0
    for start in range(0, len(words), len(weights)):
        block = words[start : start + len(weights)]
        odd = weights[: len(block)]
        product = torch.dot(odd, block) if block.is_cpu else (odd * block).sum()
        total += int(product) + 2 * start * int(block.sum())  # both wrap around at 2⁶⁴, as intended
    return total % 2**64


@cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    return 2 * torch.arange(BLOCK_WORDS[device.type], device=device) + 1
