"""Random access to a JSON-lines file. Values are parsed when they are read."""

import hashlib
import json
import os
import re
import weakref
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_gym.error import ChangedData
from skyrl_gym.tools.strict_json import MAX_DEPTH

MAX_BYTES_IN_MEMORY = 64 << 20  # smaller files are kept in memory, so later changes to them do not affect the run
CHUNK_BYTES = 8 << 20
BLOCK_ROWS = 256  # maximum number of adjacent lines to read at once

NEWLINE = 0x0A
WHITE_SPACE = np.frombuffer(b"\t\x0b\x0c\r ", np.uint8)
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class JSONLines:
    """The values in a file with one JSON value per line. Blank lines are skipped."""

    def __init__(self, path: Path) -> None:
        """Open and index the file. Raise OSError if it cannot be read."""
        self._path = path
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._identity = identify(self._file)
        self._offsets, self.digest = _index_lines(path, self._identity)
        self._content: bytes | None = None
        n_bytes = int(self._offsets[-1])
        if n_bytes <= MAX_BYTES_IN_MEMORY:
            self._content = self._read_bytes(0, n_bytes)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def read(self, indices: Sequence[int]) -> Iterator[tuple[Any, bool]]:
        """Yield (value, is plain). A plain value needs no cleaning.

        The test is cheap and conservative: a plain value certainly has no lone surrogate and at most `MAX_DEPTH`
        levels. Raise ValueError with the number of a line that is not JSON, and ChangedData if the file has changed.
        """
        for block in _split_runs(indices):
            offsets = self._offsets[block[0] : block[-1] + 2].tolist()
            content = self._read_bytes(offsets[0], offsets[-1])
            for start, end in pairwise(offsets):
                line = content[start - offsets[0] : end - offsets[0]].rstrip()  # blank lines may follow
                try:
                    value = json.loads(line.removeprefix(BOM_UTF8 if start == 0 else b"").decode())
                except UnicodeDecodeError as error:
                    raise ValueError(f"line {self._line_number(start)} is not UTF-8: {error}") from error
                except RecursionError as error:
                    raise ValueError(f"line {self._line_number(start)} is nested too deeply; flatten it") from error
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"line {self._line_number(start)} is not JSON: {error.msg} at column {error.pos + 1}"
                    ) from error
                yield value, line.count(b"{") + line.count(b"[") <= MAX_DEPTH and SURROGATE.search(line) is None

    def _read_bytes(self, start: int, end: int) -> bytes:
        if self._content is not None:
            return self._content[start:end]
        content = os.pread(self._file, end - start, start)
        if identify(self._file) != self._identity or len(content) < end - start:
            raise changed(self._path)
        return content

    def _line_number(self, offset: int) -> int:
        starts = range(0, offset, CHUNK_BYTES)
        return 1 + sum(self._read_bytes(start, min(start + CHUNK_BYTES, offset)).count(b"\n") for start in starts)


def _split_runs(indices: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield runs of consecutive indices, each of at most `BLOCK_ROWS`."""
    start = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1 or i - start == BLOCK_ROWS:
            yield indices[start:i]
            start = i


def changed(path: Path) -> ChangedData:
    """Return the error for a file whose `identify` has changed."""
    return ChangedData(f"{path} changed while it was used; restore it, and rerun the command to resume")


def identify(file: int) -> tuple[int, ...]:
    """Return what differs if an open file is replaced or written to."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=16)  # a run opens its data several times: to check, to count and to train
def _index_lines(path: Path, identity: tuple[int, ...]) -> tuple[NDArray[np.int64], str]:
    """Return the offsets of non-blank lines and of the end, and the file's hash. ChangedData if it has changed."""
    digest = hashlib.blake2b(digest_size=16)
    found, n_bytes = [], 0
    carried = np.zeros(1, np.int64)  # start of a line whose first byte is in the next chunk
    indented: list[int] = []  # lines that start with white space: possibly blank
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            values = np.frombuffer(chunk, np.uint8)
            starts = np.concatenate([carried, np.flatnonzero(values == NEWLINE) + n_bytes + 1])
            is_inside = starts < n_bytes + len(chunk)
            starts, carried = starts[is_inside], starts[~is_inside]
            first = values[starts - n_bytes]
            found.append(starts[first != NEWLINE])
            indented += starts[np.isin(first, WHITE_SPACE)].tolist()
            n_bytes += len(chunk)
        offsets = np.concatenate([*found, np.array([n_bytes])])
        if indented:
            lines = np.searchsorted(offsets, indented)
            spans = zip(offsets[lines].tolist(), offsets[lines + 1].tolist(), strict=True)
            is_blank = [not os.pread(file.fileno(), end - start, start).strip() for start, end in spans]
            offsets = np.delete(offsets, lines[is_blank])
        if identify(file.fileno()) != identity:
            raise ChangedData(f"{path} is being written; start the run once it is complete")
    return offsets, digest.hexdigest()
