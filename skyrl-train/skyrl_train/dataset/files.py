"""Dataset rows from parquet, JSON and JSON-lines files, or by name from the Hugging Face Hub.

Rows are read when they are used. Large JSON-lines files stay on disk, and so do parquet files with images, except for
one row group. Other parquet files are tables in memory, and Hub datasets are memory-mapped. Only a list in a
`.json` file is parsed up front.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_gym.runtime.text import clean_strings
from skyrl_gym.tools.strict_json import MAX_DEPTH, TooDeep, check_depth
from skyrl_train.config.root import DATA_SUFFIXES
from skyrl_train.dataset.jsonl import MAX_BYTES_IN_MEMORY, JSONLines, changed, identify
from skyrl_train.errors import DataError
from skyrl_train.rendering.messages import drop_nulls

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

Row = dict[str, Any]

MAX_QUOTED_CHARS = 80
OTHER_SUFFIXES = {".csv", ".tsv", ".txt", ".arrow", ".feather", ".xlsx", ".pkl", ".gz", ".zst", ".zip", ".ndjson"}
ROWS_AT_ONCE = 1000
IMAGE_ROWS_AT_ONCE = 32

MAX_GROUP_BYTES = 1 << 28
"""Maximum size of a group of rows in a parquet file, if a draw reads the group."""

_warned: set[str] = set()
"""Sources that were warned about. A run reads each source several times but should warn once."""


class RowSource(ABC):
    """The rows of one entry of `data.train_data` or `data.val_data`."""

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
        """Yield rows with clean text and without null fields in messages. DataError if a row is invalid or too deep."""
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
            raise DataError(f'{location} is {quote(value)}; a row is an object: {{"prompt": […], …}}')
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
            raise DataError(f"cannot read dataset file {self.name}: {error}") from error


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


class _ArrowSource(RowSource):
    """The rows of a table. The first one is row `first` of its source."""

    def __init__(self, name: str, table: pa.Table, folder: Path | None = None, first: int = 0) -> None:
        super().__init__(name, folder)
        self._table = table
        self._first = first
        self._n_at_once = ROWS_AT_ONCE
        for field in table.schema:
            if _depth(field.type) >= MAX_DEPTH:
                raise DataError(f"the column {field.name} of {name} is nested too deeply; flatten it")
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
                raise DataError(f"cannot read {which}{self.location(first)}: {error}") from error

    def read_column(self, name: str) -> Iterator[Any]:
        if name not in self._table.column_names:
            return repeat(None, len(self))
        column = _ArrowSource(self.name, self._table.select([name]))
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
        self._last: tuple[int, _ArrowSource] | None = None

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

    def _load(self, group: int, first: int) -> _ArrowSource:
        if self._last is None or self._last[0] != group:
            if identify(self._bytes.fileno()) != self._identity:
                raise changed(self._path)
            self._last = None  # its memory is needed for the next group
            self._last = (group, _ArrowSource(self.name, self._file.read_row_group(group), first=first))
        return self._last[1]

    def read_column(self, name: str) -> Iterator[Any]:
        if name not in self._file.schema_arrow.names:
            return repeat(None, len(self))
        return _ArrowSource(self.name, self._file.read(columns=[name])).read_column(name)


class JoinedRows:
    """The rows of several sources, joined in order."""

    def __init__(self, sources: Sequence[str]) -> None:
        """Open the sources. Raise DataError if one cannot be read or has no rows."""
        self._sources = [open_source(source) for source in sources]
        self._ends = list(accumulate(map(len, self._sources)))
        for source in self._sources:
            if len(source) == 0:
                raise DataError(f"no rows in {source.name}; remove it from data.train_data or data.val_data")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Row:
        ((_, row),) = self.read([index])
        return row

    @property
    def digest(self) -> str:
        """A hash of all rows in their order."""
        return hashlib.blake2b(" ".join(s.digest for s in self._sources).encode(), digest_size=16).hexdigest()

    def read(self, indices: Sequence[int]) -> Iterator[tuple[str, Row]]:
        """Yield (location, row). `indices` must ascend. The location is text for messages.

        Lone surrogates become "?", with one warning per source. Raise DataError for a row that cannot be read or is
        nested too deeply, and StorageError if a file has changed since it was opened.
        """
        start = 0
        for source, end in zip(self._sources, self._ends, strict=True):
            chosen = indices[bisect_left(indices, start) : bisect_left(indices, end)]
            inner = chosen if start == 0 else [index - start for index in chosen]
            for index, row in zip(inner, source.read(inner), strict=True):
                yield source.location(index), row
            start = end

    def folder(self, index: int) -> Path | None:
        """Return the folder where relative paths in a row start, or None for a dataset of the Hub."""
        return self._sources[bisect_right(self._ends, index)].folder

    def read_column(self, name: str) -> Iterator[Any]:
        """Yield the values of a column, None for rows without it. Raises as `read` does."""
        return (value for source in self._sources for value in source.read_column(name))

    def sample(self, max_rows: int | None) -> Sequence[int]:
        """Return the indices of all rows, or of a random but reproducible sample of `max_rows`, in ascending order.

        Sources have equal shares of the sample, but a source smaller than its share is included completely.
        """
        if max_rows is None or len(self) <= max_rows:
            return range(len(self))
        generator = random.Random(0)
        sample: list[int] = []
        by_size = sorted((len(source), end) for source, end in zip(self._sources, self._ends, strict=True))
        for i, (n_rows, end) in enumerate(by_size):
            n_chosen = min(n_rows, (max_rows - len(sample)) // (len(by_size) - i))
            sample += generator.sample(range(end - n_rows, end), n_chosen)
        return sorted(sample)


def open_source(source: str) -> RowSource:
    """Open one entry of `data.train_data` or `data.val_data`.

    Args:
        source: a `.parquet`, `.json` or `.jsonl` file, a folder of `save_to_disk`, or a Hub dataset as `owner/name` or
            `owner/name/config`. The last two may end in `:split` (default: train). `~` and `$VARIABLES` are expanded.

    Raises:
        DataError: the file does not exist or cannot be read.
    """
    path = local_path(source)
    if path is None:
        return _ArrowSource(source, _load_from_hub(source))
    if (fault := find_fault(path)) is not None:
        raise DataError(f"dataset file {path} {fault}; check data.train_data and data.val_data")
    try:
        if path.suffix == ".parquet":
            import pyarrow as pa  # takes half a second
            import pyarrow.parquet as pq

            try:
                if path.stat().st_size > MAX_BYTES_IN_MEMORY and _has_small_image_groups(source, path):
                    return _ParquetSource(source, path)
                return _ArrowSource(source, pq.read_table(path), path.parent)
            except pa.ArrowException as error:
                raise ValueError(str(error)) from error
        has_lines = path.suffix == ".jsonl" or _is_json_lines(path)
        return (_JSONLinesSource if has_lines else _JSONSource)(source, path)
    except RecursionError as error:
        raise DataError(f"cannot read dataset file {path}: its JSON is nested too deeply; flatten it") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read dataset file {path}: {error}") from error


def read_rows(source: str) -> list[Row]:
    """Read all rows of a source. Raises as `open_source` and `JoinedRows.read` do."""
    rows = open_source(source)
    return list(rows.read(range(len(rows))))


def clean_row(row: Row, location: str) -> Row:
    """Return a row with lone surrogates replaced. DataError if it is nested too deeply."""
    try:
        check_depth(row)
    except TooDeep as error:
        raise DataError(f"{location}: {error}; flatten its lists and objects") from error
    return clean_strings(row)


def quote(value: Any) -> str:
    """Format a value for a message, cut to `MAX_QUOTED_CHARS`."""
    return repr(value)[:MAX_QUOTED_CHARS]


def local_path(source: str) -> Path | None:
    """Return the path of a data file with `~` and `$VARIABLES` expanded, or None for a dataset on the Hub."""
    path = Path(os.path.expandvars(source)).expanduser()
    return path if path.suffix in DATA_SUFFIXES else None


def is_other_file(source: str) -> bool:
    """Return True for a file in a format that is not read, such as `rows.csv`."""
    path = Path(source.partition(":")[0])
    return path.suffix in OTHER_SUFFIXES or (path.suffix not in DATA_SUFFIXES and path.is_file())


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


def count_rows(source: str) -> int | None:
    """Return the number of rows of a data file, or None for a dataset on the Hub. Raises as `open_source` does."""
    path = local_path(source)
    if path is None:
        return None
    if path.suffix != ".parquet" or not path.is_file():
        return len(open_source(source))
    import pyarrow as pa  # takes half a second
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read dataset file {path}: {error}") from error


def check_row_count(n_rows: int, batch_size: int) -> None:
    """Raise DataError if the training data does not fill one batch."""
    if n_rows < batch_size:
        raise DataError(
            f"data.train_data has {n_rows} usable rows, fewer than trainer.train_batch_size={batch_size}; lower the "
            "batch size or add data"
        )


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line. The file appears only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    partial.replace(path)


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


def _load_from_hub(source: str) -> pa.Table:
    """Load a dataset from the Hub or a `save_to_disk` folder as a memory-mapped table."""
    import datasets

    source = os.path.expanduser(os.path.expandvars(source))
    name, _, split = source.partition(":")
    config: str | None = None
    parts = name.split("/")
    if len(parts) == 3 and all(parts) and not Path(name).exists():  # owner/name/config, not a local folder
        name, config = "/".join(parts[:2]), parts[2]
    if is_other_file(source):
        raise DataError(f"cannot load {source!r}: a data file must end in .parquet, .json or .jsonl; convert it")
    try:
        if any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):  # of save_to_disk
            saved = datasets.load_from_disk(name)
            if isinstance(saved, datasets.DatasetDict):
                if (split or "train") not in saved:
                    raise ValueError(f"it has the splits {', '.join(saved)}")
                saved = saved[split or "train"]
            elif split and split != str(saved.split):  # the split it was saved from
                raise ValueError(f"it has no splits, only {len(saved)} rows; remove :{split}")
            return saved.with_format("arrow")[:]
        return datasets.load_dataset(name, config, split=split or "train").with_format("arrow")[:]
    except Exception as error:  # the boundary to the Hub: its client raises dozens of types
        raise DataError(
            f"cannot load {source!r} from the Hugging Face Hub ({type(error).__name__}: {error}). Write a dataset as "
            "owner/name:split or owner/name/config:split. A local file must end in .parquet, .json or .jsonl."
        ) from error
