"""Dataset rows for environments without a trainer: read as training reads them, and split as training splits them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl_gym.contract import is_conversation
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.envs.row import max_turns_of

MAX_TURNS = 10  # where a row does not say


def read_row(path: Path, index: int) -> dict[str, Any]:
    """Row `index` of a `.parquet`, `.json` or `.jsonl` file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is of another kind, or it has no such row.
        ImportError: for parquet, pyarrow is missing.
    """
    read = _READERS.get(path.suffix)
    if read is None:
        raise ValueError(f"--data {path}: a file of .parquet, .json or .jsonl is read here")
    if not path.is_file():
        raise FileNotFoundError(f"--data {path}: there is no such file")
    rows = read(path)
    if not 0 <= index < len(rows):
        raise ValueError(f"--row {index}: {path} has " + (f"rows 0 to {len(rows) - 1}" if rows else "no rows"))
    row = rows[index]
    if not isinstance(row, dict):
        raise ValueError(f"row {index} of {path} is {str(row)[:80]!r}; a row is an object")
    return row


def prompt_and_extras(row: Mapping[str, Any]) -> tuple[ConversationType, dict[str, Any]]:
    """What `init` is given, and the constructor. Of an empty row, a prompt that says to begin.

    In training, `generator.max_turns` takes the place of the row's `max_turns`; here it is the row's, if it has any.

    Raises:
        ValueError: the prompt is no list of messages, or `max_turns` no number of turns.
    """
    prompt = row.get("prompt") or [{"role": "user", "content": "Begin."}]
    if not is_conversation(prompt):
        raise ValueError(f'prompt={str(prompt)[:80]!r} is not a list of messages; write [{{"role": "user", …}}]')
    extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
    return prompt, extras | {"max_turns": max_turns_of(extras, MAX_TURNS)}


def _read_parquet(path: Path) -> list[Any]:
    """The rows as Python objects: structs are dicts, and what a row lacks is None."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(
            f"--data {path}: .parquet is read by pyarrow, which is missing; pip install pyarrow"
        ) from error
    try:
        rows: list[Any] = pq.read_table(path).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"--data {path}: {error}") from error
    return rows


def _read_json(path: Path) -> list[Any]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError(f"--data {path}: a .json file holds a list of rows")
    return rows


def _read_jsonl(path: Path) -> list[Any]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as error:
                raise ValueError(f"--data {path}: line {number} is not JSON: {error}") from error
    return rows


_READERS: Mapping[str, Callable[[Path], list[Any]]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
}
