"""Attention whose results do not depend on the other sequences of a pass.

Each row reads one token and is padded to a length that depends on the row alone. For the same number of rows, its
states are then bitwise the same among any other rows.
"""

from collections.abc import Iterator, Sequence

import torch

from skyrl_train.inference_engines.hf.attention import RowRun, pool_slice
from skyrl_train.inference_engines.hf.kv_memory import UNIT, KVMemory
from skyrl_train.inference_engines.hf.scheduler import Row

MAX_COPIED = 512  # maximum tokens of a sequence whose keys are copied to form runs


def padded_length(row: Row) -> int:
    """Return the number of keys that a row attends to.

    It is the next power of two of 64-token units, or from 512 tokens on the next multiple of 512.
    """
    n_units = -(-(row.n_before + 1) // UNIT)
    n_max = MAX_COPIED // UNIT
    return UNIT * (1 << (n_units - 1).bit_length() if n_units <= n_max else -(-n_units // n_max) * n_max)


def join_equal_lengths(rows: Sequence[Row], position_ids: torch.Tensor, memory: KVMemory) -> Iterator[RowRun]:
    """Join rows of one token with the same `padded_length` into runs.

    Rows are in the order of `padded_length`, then of their regions. The regions of short rows may be anywhere.
    """
    first = 0
    while first < len(rows):
        length, end = padded_length(rows[first]), first + 1
        while end < len(rows) and padded_length(rows[end]) == length and _is_readable(rows, end, length):
            end += 1
        stored = pool_slice([row.start for row in rows[first:end]], length, memory.size, position_ids.device)
        yield RowRun(slice(first, end), stored, position_ids[first:end, None], is_causal=False, sees_all=False)
        first = end


def _is_readable(rows: Sequence[Row], index: int, length: int) -> bool:
    """Return True if a row can be read with the row before it: its keys are few enough to copy, or next to them."""
    row, before = rows[index], rows[index - 1]
    is_next = row.region.capacity == before.region.capacity and row.start == before.start + before.region.capacity
    return length <= MAX_COPIED or is_next
