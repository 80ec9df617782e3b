"""Read dataset rows from parquet, JSON and JSON-lines files, or by name from the Hugging Face Hub."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from skyrl_gym.runtime.text import clean_strings
from skyrl_gym.tools.strict_json import TooDeep, check_depth
from skyrl_train.config.root import DATA_SUFFIXES
from skyrl_train.errors import DataError

logger = logging.getLogger(__name__)

Row = dict[str, Any]

MAX_QUOTED_CHARS = 80

_warned: set[str] = set()
"""Sources that were warned about: a run reads each one twice, to check its rows and to tokenize them."""


def read_rows(source: str) -> list[Row]:
    """Return the rows of one entry of `data.train_data` or `data.val_data`.

    Args:
        source: a `.parquet`, `.json` or `.jsonl` file (`~` and `$VARIABLES` are expanded), or a Hub dataset as
            `owner/name` (its train split), `owner/name:split` or, if it has configurations, `owner/name/config:split`.

    Raises:
        DataError: the file does not exist or cannot be read.
    """
    path = local_path(source)
    if path is None:
        return _read_from_hub(source)
    if (fault := find_fault(path)) is not None:
        raise DataError(f"dataset file {path} {fault}; check data.train_data and data.val_data")
    try:
        rows = _READERS[path.suffix](path)
    except RecursionError as error:
        raise DataError(f"cannot read dataset file {path}: its JSON is nested too deeply; flatten it") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read dataset file {path}: {error}") from error
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f'row {i} of {path} is {str(row)[:80]!r}; a row is an object: {{"prompt": […], …}}')
    return rows


def read_clean_rows(sources: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield the location, for messages, and the content of every row.

    Lone surrogates become "?", with one warning per source.

    Raises:
        DataError: a source cannot be read or has no rows, or a row is nested too deeply.
    """
    for source in sources:
        rows = read_rows(source)
        if not rows:
            raise DataError(f"no rows in {source}; remove it from data.train_data or data.val_data")
        replaced: list[str] = []
        for index, row in enumerate(rows):
            location = f"row {index} of {source}"
            cleaned = clean_row(row, location)
            if cleaned != row:
                replaced.append(location)
            yield location, cleaned
        if replaced and source not in _warned:
            _warned.add(source)
            logger.warning(
                'Lone surrogates (halves of characters) are replaced by "?" in %d rows, the first: %s',
                *(len(replaced), replaced[0]),
            )


def clean_row(row: Row, location: str) -> Row:
    """Return a row without lone surrogates; DataError if it is nested too deeply."""
    try:
        check_depth(row)
    except TooDeep as error:
        raise DataError(f"{location}: {error}; flatten its lists and objects") from error
    cleaned: Row = clean_strings(row)
    return cleaned


def quote(value: Any) -> str:
    """Format a value for a message, cut to its beginning."""
    return repr(value)[:MAX_QUOTED_CHARS]


def local_path(source: str) -> Path | None:
    """Return the path of a data file, with `~` and `$VARIABLES` expanded; None for a dataset on the Hub."""
    path = Path(os.path.expandvars(source)).expanduser()
    return path if path.suffix in DATA_SUFFIXES else None


def find_fault(path: Path) -> str | None:
    """Return why a path is not a file that can be read, e.g. "is a folder"; None if it is."""
    try:
        if path.is_file():
            return None
        return "is a folder" if path.is_dir() else "is not a regular file" if path.exists() else "does not exist"
    except (OSError, ValueError) as error:  # a name with NUL, or too long
        return f"cannot be opened ({error})"


def count_rows(source: str) -> int | None:
    """Return the number of rows of a data file, None for a dataset on the Hub; DataError as `read_rows`."""
    path = local_path(source)
    if path is None:
        return None
    if path.suffix != ".parquet" or not path.is_file():
        return len(read_rows(source))
    import pyarrow as pa  # takes half a second
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read dataset file {path}: {error}") from error


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line; the file appears when it is complete."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    partial.replace(path)


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow as pa  # takes half a second
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error


def _read_json(path: Path) -> list[Row]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError(f"expected a list of rows, found {type(rows).__name__}; use .jsonl for one object a line")
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is not JSON: {error.msg} at column {error.colno}") from error
    return rows


def _read_from_hub(source: str) -> list[Row]:
    import datasets

    name, config, split = _hub_name(source)
    try:
        return datasets.load_dataset(name, config, split=split).to_list()
    except Exception as error:  # the boundary to the Hub: its client raises dozens of types
        raise DataError(
            f"cannot load {source!r} from the Hugging Face Hub ({type(error).__name__}: {error}); a dataset is written "
            "owner/name:split, or owner/name/config:split; a local file must end in .parquet, .json or .jsonl"
        ) from error


def _hub_name(source: str) -> tuple[str, str | None, str]:
    """Return dataset, configuration and split of `owner/name/config:split`; the last two are optional."""
    name, _, split = source.partition(":")
    parts = name.split("/")
    if len(parts) == 3 and all(parts) and not Path(name).exists():  # a local folder is a dataset too
        return "/".join(parts[:2]), parts[2], split or "train"
    return name, None, split or "train"


_READERS: dict[str, Callable[[Path], list[Row]]] = dict(
    zip(DATA_SUFFIXES, (_read_parquet, _read_json, _read_jsonl), strict=True)
)
