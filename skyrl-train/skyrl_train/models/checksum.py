"""A checksum that detects changed and swapped values, and that adds up over the tensors of a model."""

import zlib
from collections.abc import Sequence
from functools import cache

import torch

WORD_BYTES = 8
ROW_WORDS = 1 << 13
ROW_BYTES = ROW_WORDS * WORD_BYTES
BLOCK_BYTES = 1 << 20  # per core: a block and its copy fit into the core's cache


def tensor_checksum(name: str, tensor: torch.Tensor) -> int:
    """Return Σ (2i + 1) · (wordᵢ + c) mod 2⁶⁴ over the tensor's words of 8 bytes, where c is a checksum of its name.

    The last word is padded with zeros. An odd weight has an inverse modulo 2⁶⁴, so no change of a single word goes
    unnoticed. The checksum of a model is the sum over its tensors, modulo 2⁶⁴, in any order.
    """
    checksum = Checksum(name)
    for block in split_into_blocks(flat_bytes(tensor)):
        checksum.add(block)
    return checksum.value


class Checksum:
    """Running checksum of a tensor whose bytes arrive in parts, in order. All parts but the last are whole words.

    Multiplying every word by its weight would take twice as long as adding words up. In a matrix with C words per row,
    word i is in row r and column c with i = rC + c, and its weight 2i + 1 = 2rC + (2c + 1) splits into a part for the
    row and a part for the column:

        Σ (2i + 1) · wordᵢ = Σ_r 2rC · (sum of row r) + Σ_c (2c + 1) · (sum of column c)

    So only the sums are multiplied. All arithmetic wraps around at 2⁶⁴, as intended.
    """

    def __init__(self, name: str) -> None:
        self._c = zlib.crc32(name.encode())
        self._total = 0  # Σ (2i + 1) · wordᵢ without the part of the columns
        self._columns: torch.Tensor | int = 0  # (C,) sums of columns
        self.n_words = 0

    def add(self, part: torch.Tensor) -> None:
        """Append bytes (n,)."""
        if part.storage_offset() % WORD_BYTES:
            part = part.clone()  # words must be aligned
        n_rows, n_bytes = len(part) // ROW_BYTES, len(part)
        if n_rows:
            rows = part[: n_rows * ROW_BYTES].view(torch.int64).view(n_rows, -1)
            self._columns += rows.sum(0)
            self._add_words(rows.sum(1), _row_weights(n_rows, part.device), n_rows * ROW_BYTES // WORD_BYTES)
        if n_words := n_bytes % ROW_BYTES // WORD_BYTES:
            words = part[n_rows * ROW_BYTES : n_bytes - n_bytes % WORD_BYTES].view(torch.int64)
            self._add_words(words, _odd_numbers(part.device)[:n_words], n_words)
        if n_bytes % WORD_BYTES:
            rest = bytes(part[n_bytes - n_bytes % WORD_BYTES :].tolist())
            self._total += (2 * self.n_words + 1) * int.from_bytes(rest, "little")
            self.n_words += 1

    def _add_words(self, sums: torch.Tensor, weights: torch.Tensor, n_words: int) -> None:
        """Add Σ (weightⱼ + 2s) · sumⱼ, where s is the number of words before these."""
        self._total += _dot(sums, weights) + 2 * self.n_words * int(sums.sum())
        self.n_words += n_words

    @property
    def value(self) -> int:
        """The checksum of everything so far."""
        columns = self._columns
        of_columns = 0 if isinstance(columns, int) else _dot(columns, _odd_numbers(columns.device))
        return (self._total + of_columns + self._c * self.n_words**2) % 2**64  # Σ (2i + 1) = n²


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor (n,) in order, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def split_into_blocks(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split bytes (n,) into blocks that fit into the cores' caches. On a GPU, return one block."""
    return flat.split(BLOCK_BYTES * torch.get_num_threads()) if flat.is_cpu else (flat,)


def _dot(left: torch.Tensor, right: torch.Tensor) -> int:
    return int(torch.dot(left, right) if left.is_cpu else (left * right).sum())


@cache
def _row_weights(n_rows: int, device: torch.device) -> torch.Tensor:
    return 2 * ROW_WORDS * torch.arange(n_rows, device=device)


@cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    return 2 * torch.arange(ROW_WORDS, device=device) + 1
