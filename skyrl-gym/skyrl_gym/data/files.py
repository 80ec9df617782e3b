"""Dataset rows from parquet, JSON and JSON-lines files.

Rows are read when they are used. Large JSON-lines files stay on disk, and so do parquet files with images, except for
one row group. Other parquet files are tables in memory. Only a list in a `.json` file is parsed up front.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_gym.data.jsonl import MAX_BYTES_IN_MEMORY, JSONLines, changed, identify
from skyrl_gym.error import UnreadableData
from skyrl_gym.runtime.text import clean_strings
from skyrl_gym.tools.strict_json import MAX_DEPTH, TooDeep, check_depth

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

Row = dict[str, Any]

SUFFIXES = (".parquet", ".json", ".jsonl")
"""Suffixes of files that `open_file` reads."""

MAX_QUOTED_CHARS = 80
ROWS_AT_ONCE = 1000
IMAGE_ROWS_AT_ONCE = 32

MAX_GROUP_BYTES = 1 << 28
"""Maximum size of a group of rows in a parquet file, if a draw reads the group."""

_warned: set[str] = set()
"""Sources that were warned about. A run reads each source several times but should warn once."""


class RowSource(ABC):
    """The rows of one file or table."""

    _digest: str

    def __init__(self, name: str, folder: Path | None = None) -> None:
        """`folder` is where relative paths in the rows start, if it is known."""
        self.name = name
        self.folder = folder

    @property
    def digest(self) -> str:
        """A hash of all rows in their order."""
        return self._digest

    @abstractmethod
    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> Iterator[Row]:
        """Yield rows with clean text and without null fields in messages.

        Raises:
            UnreadableData: a row is invalid or nested too deeply.
            ChangedData: the file has changed since it was opened.
        """
        for row in self._read(indices):
            for name, value in row.items():
                if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
                    row[name] = drop_nulls(value)
            yield row

    @abstractmethod
    def _read(self, indices: Sequence[int]) -> Iterator[Row]: ...

    def read_column(self, name: str) -> Iterator[Any]:
        """Yield the values of a column, None for rows without it. Raises as `read` does."""
        return (row.get(name) for row in self.read(range(len(self))))

    def location(self, index: int) -> str:
        """Return the origin of a row for messages: `row 17 of train.jsonl`."""
        return f"row {index} of {self.name}"

    def _clean(self, value: Any, index: int) -> Row:
        location = self.location(index)
        if not isinstance(value, dict):
            raise UnreadableData(f'{location} is {quote(value)}; a row is an object: {{"prompt": […], …}}')
        row = clean_row(value, location)
        if row != value and self.name not in _warned:
            _warned.add(self.name)
            logger.warning(
                '%s has lone surrogates (halves of characters), which are replaced by "?" in all rows', location
            )
        return row


class _JSONLinesSource(RowSource):
    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path.parent)
        self._lines = JSONLines(path)
        self._digest = self._lines.digest

    def __len__(self) -> int:
        return len(self._lines)

    def _read(self, indices: Sequence[int]) -> Iterator[Row]:
        try:
            for index, (value, is_plain) in zip(indices, self._lines.read(indices), strict=True):
                yield value if is_plain and isinstance(value, dict) else self._clean(value, index)
        except ValueError as error:
            raise UnreadableData(f"cannot read dataset file {self.name}: {error}") from error


class _JSONSource(RowSource):
    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path.parent)
        content = path.read_bytes()
        rows = json.loads(content.decode("utf-8-sig"))
        if not isinstance(rows, list):
            raise ValueError(f"expected a list of rows, or one object a line, found {type(rows).__name__}")
        self._rows = rows
        self._digest = hashlib.blake2b(content, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, indices: Sequence[int]) -> Iterator[Row]:
        return (self._clean(self._rows[index], index) for index in indices)


class TableSource(RowSource):
    """The rows of a table. The first one is row `first` of its source."""

    def __init__(self, name: str, table: pa.Table, folder: Path | None = None, first: int = 0) -> None:
        super().__init__(name, folder)
        self._table = table
        self._first = first
        self._n_at_once = ROWS_AT_ONCE
        for field in table.schema:
            if _depth(field.type) >= MAX_DEPTH:
                raise UnreadableData(f"the column {field.name} of {name} is nested too deeply; flatten it")
            if _has_bytes(field.type):
                self._n_at_once = IMAGE_ROWS_AT_ONCE

    @cached_property
    def digest(self) -> str:
        columns = [(field.name, str(field.type)) for field in self._table.schema]
        digest = hashlib.blake2b(repr(columns).encode(), digest_size=16)
        for start in range(0, len(self), self._n_at_once):
            rows = self._table.slice(start, self._n_at_once)
            copy = rows.take(list(range(len(rows)))).combine_chunks()  # the bytes of a slice depend on the whole table
            for batch in copy.to_batches():
                digest.update(batch.serialize())
        return digest.hexdigest()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def location(self, index: int) -> str:
        return super().location(self._first + index)

    def _read(self, indices: Sequence[int]) -> Iterator[Row]:
        for start in range(0, len(indices), self._n_at_once):
            chunk = indices[start : start + self._n_at_once]
            first, n_rows = chunk[0], chunk[-1] - chunk[0] + 1
            rows = self._table.slice(first, n_rows)
            if n_rows > len(chunk):
                rows = rows.take([index - first for index in chunk])
            try:
                yield from rows.to_pylist(maps_as_pydicts="strict")
            except (KeyError, ValueError) as error:  # a map with equal keys, or bytes that are not UTF-8
                which = "" if n_rows == 1 else f"one of the {n_rows:,} rows starting at "
                raise UnreadableData(f"cannot read {which}{self.location(first)}: {error}") from error

    def read_column(self, name: str) -> Iterator[Any]:
        if name not in self._table.column_names:
            return repeat(None, len(self))
        column = TableSource(self.name, self._table.select([name]))
        return (row[name] for row in column.read(range(len(self))))


class _ParquetSource(RowSource):
    """A parquet file with images. Row groups are read when they are used, and the last one is kept."""

    def __init__(self, name: str, path: Path) -> None:
        import pyarrow.parquet as pq

        super().__init__(name, path.parent)
        self._path = path
        self._bytes = path.open("rb")
        self._identity = identify(self._bytes.fileno())
        self._file = pq.ParquetFile(self._bytes)
        metadata = self._file.metadata
        self._ends = list(accumulate(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)))
        self._last: tuple[int, TableSource] | None = None

    @cached_property
    def digest(self) -> str:
        self._bytes.seek(0)
        return hashlib.file_digest(self._bytes, partial(hashlib.blake2b, digest_size=16)).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _read(self, indices: Sequence[int]) -> Iterator[Row]:
        start = 0
        while start < len(indices):
            group = bisect_right(self._ends, indices[start])
            end = bisect_left(indices, self._ends[group], start)
            first = self._ends[group - 1] if group else 0
            yield from self._load(group, first)._read([index - first for index in indices[start:end]])
            start = end

    def _load(self, group: int, first: int) -> TableSource:
        if self._last is None or self._last[0] != group:
            if identify(self._bytes.fileno()) != self._identity:
                raise changed(self._path)
            self._last = None  # its memory is needed for the next group
            self._last = (group, TableSource(self.name, self._file.read_row_group(group), first=first))
        return self._last[1]

    def read_column(self, name: str) -> Iterator[Any]:
        if name not in self._file.schema_arrow.names:
            return repeat(None, len(self))
        return TableSource(self.name, self._file.read(columns=[name])).read_column(name)


def open_file(name: str, path: Path, setting: str) -> RowSource:
    """Open a `.parquet`, `.json` or `.jsonl` file. Messages call it `name`.

    Raises:
        UnreadableData: the file does not exist or cannot be read. The message names the `setting` to check.
        ImportError: the file is Parquet and pyarrow is not installed.
    """
    if (fault := find_fault(path)) is not None:
        raise UnreadableData(f"dataset file {path} {fault}; check {setting}")
    try:
        if path.suffix == ".parquet":
            return _open_parquet(name, path)
        has_lines = path.suffix == ".jsonl" or _is_json_lines(path)
        return (_JSONLinesSource if has_lines else _JSONSource)(name, path)
    except RecursionError as error:
        raise UnreadableData(f"cannot read dataset file {path}: its JSON is nested too deeply; flatten it") from error
    except (OSError, ValueError) as error:
        raise UnreadableData(f"cannot read dataset file {path}: {error}") from error


def _open_parquet(name: str, path: Path) -> RowSource:
    try:
        import pyarrow as pa  # takes half a second
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(
            f"{path}: reading .parquet needs pyarrow, which is not installed; run pip install pyarrow"
        ) from error
    try:
        if path.stat().st_size > MAX_BYTES_IN_MEMORY and _has_small_image_groups(name, path):
            return _ParquetSource(name, path)
        return TableSource(name, pq.read_table(path), path.parent)
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error


def clean_row(row: Row, location: str) -> Row:
    """Return a row with lone surrogates replaced. UnreadableData if it is nested too deeply."""
    try:
        check_depth(row)
    except TooDeep as error:
        raise UnreadableData(f"{location}: {error}; flatten its lists and objects") from error
    return clean_strings(row)


def quote(value: Any) -> str:
    """Format a value for a message, cut to `MAX_QUOTED_CHARS`."""
    return repr(value)[:MAX_QUOTED_CHARS]


def drop_nulls(value: Any) -> Any:
    """Drop null fields: a table has a null in every row that lacks a field.

    The `content` of a message stays, because OpenAI writes null there if the message has tool calls.
    """
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    is_message = "role" in value
    return {
        name: drop_nulls(part) for name, part in value.items() if part is not None or (is_message and name == "content")
    }


def find_fault(path: Path) -> str | None:
    """Return why a path is not a readable file, e.g. "is a folder", or None if it is one."""
    try:
        if path.is_file():
            return None
        if re.match(r"\w+:/", str(path)):
            return "is a URL, not a local file"
        return "is a folder" if path.is_dir() else "is not a regular file" if path.exists() else "does not exist"
    except (OSError, ValueError) as error:  # a name with NUL, or too long
        return f"cannot be opened ({error})"


def _is_json_lines(path: Path) -> bool:
    """Return True if the first line of a `.json` file is a complete object, as Hugging Face datasets write them."""
    with path.open("rb") as file:
        if file.read(len(BOM_UTF8) + 1).removeprefix(BOM_UTF8).lstrip().startswith(b"["):
            return False  # a list: do not read on, the first line may be the whole file
        file.seek(0)
        line = file.readline().removeprefix(BOM_UTF8).strip()
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:  # the first line of a list
        return False


def _has_small_image_groups(name: str, path: Path) -> bool:
    """Return True for a parquet file with images whose groups of rows are small enough to read for one row.

    Warn if the groups are too large.
    """
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    if not any(_has_bytes(field.type) for field in file.schema_arrow):
        return False
    metadata = file.metadata
    largest = max((metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)), default=0)
    if largest > MAX_GROUP_BYTES and name not in _warned:
        _warned.add(name)
        logger.warning(
            "%s has groups of rows of up to %.1f GB, so all images stay in memory; write it with smaller groups, e.g. "
            "pyarrow.parquet.write_table(table, path, row_group_size=100)",
            *(name, largest / 1e9),
        )
    return largest <= MAX_GROUP_BYTES


def _has_bytes(kind: pa.DataType) -> bool:
    """Return True if a type holds bytes, like the images of Hugging Face datasets."""
    from pyarrow import types

    is_bytes = types.is_binary(kind) or types.is_large_binary(kind)
    return is_bytes or any(_has_bytes(kind.field(i).type) for i in range(kind.num_fields))


def _depth(kind: pa.DataType) -> int:
    """Return the nesting depth of a type's lists and structs."""
    return 1 + max((_depth(kind.field(i).type) for i in range(kind.num_fields)), default=0)
