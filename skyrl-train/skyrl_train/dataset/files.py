"""Dataset rows of several files, and of datasets by name from the Hugging Face Hub, which are memory-mapped."""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_gym.data.files import SUFFIXES, Row, RowSource, TableSource, open_file
from skyrl_gym.error import ChangedData, UnreadableData
from skyrl_train.errors import DataError, StorageError

if TYPE_CHECKING:
    import pyarrow as pa

OTHER_SUFFIXES = {".csv", ".tsv", ".txt", ".arrow", ".feather", ".xlsx", ".pkl", ".gz", ".zst", ".zip", ".ndjson"}


@contextmanager
def reading_rows() -> Iterator[None]:
    """Raise errors of the reader as DataError, or as StorageError if a file has changed."""
    try:
        yield
    except ChangedData as error:
        raise StorageError(str(error)) from error
    except UnreadableData as error:
        raise DataError(str(error)) from error


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
            with reading_rows():
                for index, row in zip(inner, source.read(inner), strict=True):
                    yield source.location(index), row
            start = end

    def folder(self, index: int) -> Path | None:
        """Return the folder where relative paths in a row start, or None for a dataset of the Hub."""
        return self._sources[bisect_right(self._ends, index)].folder

    def read_column(self, name: str) -> Iterator[Any]:
        """Yield the values of a column, None for rows without it. Raises as `read` does."""
        with reading_rows():
            for source in self._sources:
                yield from source.read_column(name)

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
    with reading_rows():
        if path is None:
            return TableSource(source, _load_from_hub(source))
        return open_file(source, path, "data.train_data and data.val_data")


def read_rows(source: str) -> list[Row]:
    """Read all rows of a source. Raises as `open_source` and `JoinedRows.read` do."""
    rows = open_source(source)
    with reading_rows():
        return list(rows.read(range(len(rows))))


def local_path(source: str) -> Path | None:
    """Return the path of a data file with `~` and `$VARIABLES` expanded, or None for a dataset on the Hub."""
    path = Path(os.path.expandvars(source)).expanduser()
    return path if path.suffix in SUFFIXES else None


def is_other_file(source: str) -> bool:
    """Return True for a file in a format that is not read, such as `rows.csv`."""
    path = Path(source.partition(":")[0])
    return path.suffix in OTHER_SUFFIXES or (path.suffix not in SUFFIXES and path.is_file())


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
    """Write one JSON object per line, in a folder that is created if missing. The file appears once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    partial.replace(path)


def write_temporary(rows: Iterable[Row]) -> str:
    """Write rows to a JSONL file in the user's temporary folder, named by their hash. Return its path."""
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    folder = Path(tempfile.gettempdir()) / f"skyrl-rows-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{hashlib.blake2b(content.encode(), digest_size=12).hexdigest()}.jsonl"
    with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8", delete=False) as new:
        new.write(content)
    os.replace(new.name, path)
    return str(path)


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
