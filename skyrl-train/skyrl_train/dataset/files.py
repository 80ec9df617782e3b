"""Read dataset rows from parquet, JSON and JSON-lines files, or by name from the Hugging Face Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_train.errors import DataError

Row = dict[str, Any]


def read_rows(source: str) -> list[Row]:
    """The rows of one entry of `data.train_data` or `data.val_data`.

    Args:
        source: a `.parquet`, `.json` or `.jsonl` file (`~` and `$VARIABLES` are expanded), or a Hub dataset as
            `name` (its train split) or `name:split`.

    Raises:
        DataError: no such file, or one that cannot be read; names the path and the reason.
    """
    path = Path(os.path.expandvars(source)).expanduser()
    read = _READERS.get(path.suffix)
    if read is None:
        return _read_from_hub(source)
    if not path.is_file():
        raise DataError(f"dataset file {path} does not exist; check data.train_data and data.val_data")
    try:
        rows = read(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"cannot read dataset file {path}: {error}") from error
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f'row {i} of {path} is {str(row)[:80]!r}; a row is an object: {{"prompt": […], …}}')
    return rows


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object a line; the file appears when it is complete."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    partial.replace(path)


def _read_parquet(path: Path) -> list[Row]:
    return pq.read_table(path).to_pylist()


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

    name, _, split = source.partition(":")
    try:
        return datasets.load_dataset(name, split=split or "train").to_list()
    except Exception as error:  # the boundary to the Hub: its client raises dozens of types
        raise DataError(
            f"cannot load {source!r} from the Hugging Face Hub ({type(error).__name__}: {error}); "
            "a local file must end in .parquet, .json or .jsonl"
        ) from error


_READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
}
