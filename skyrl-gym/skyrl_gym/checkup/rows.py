"""Dataset rows for environments without a trainer, read and split as in training."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.envs.row import read_max_turns
from skyrl_gym.runtime.validation import is_conversation

DEFAULT_MAX_TURNS = 10


def read_row(path: Path, index: int) -> dict[str, Any]:
    """Return row `index` of a `.parquet`, `.json` or `.jsonl` file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the format is not supported, or the file has no such row.
        ImportError: the file is Parquet and pyarrow is not installed.
    """
    read = _READERS.get(path.suffix)
    if read is None:
        raise ValueError(f"--data {path} is not supported; use a .parquet, .json or .jsonl file")
    if not path.is_file():
        raise FileNotFoundError(f"--data {path} does not exist or is not a file")
    rows = read(path)
    if not 0 <= index < len(rows):
        raise ValueError(f"--row {index}: {path} has " + (f"rows 0 to {len(rows) - 1}" if rows else "no rows"))
    row = rows[index]
    if not isinstance(row, dict):
        raise ValueError(f"row {index} of {path} is {str(row)[:80]!r}; a row must be an object")
    return row


def split_row(row: Mapping[str, Any]) -> tuple[ConversationType, dict[str, Any]]:
    """Split a row into the prompt for `init` and the `extras` for the constructor.

    A row without a prompt gets the prompt "Begin.". In training, `generator.max_turns` replaces the row's `max_turns`.
    Here the row's value counts, and it defaults to `DEFAULT_MAX_TURNS`. `reads_images` defaults to True.

    Raises:
        ValueError: the prompt is not a list of messages, or `max_turns` is not a number of turns.
    """
    prompt = row.get("prompt") or [{"role": "user", "content": "Begin."}]
    if not is_conversation(prompt):
        raise ValueError(f'prompt={str(prompt)[:80]!r} is not a list of messages; use [{{"role": "user", …}}]')
    extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
    return prompt, {"reads_images": True} | extras | {"max_turns": read_max_turns(extras, DEFAULT_MAX_TURNS)}


def _read_parquet(path: Path) -> list[Any]:
    """Return the rows as Python objects: a struct becomes a dict, and a missing value None."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(
            f"--data {path}: reading .parquet needs pyarrow, which is not installed; run pip install pyarrow"
        ) from error
    try:
        rows: list[Any] = pq.read_table(path).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"--data {path}: {error}") from error
    return rows


def _read_json(path: Path) -> list[Any]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError(f"--data {path}: a .json file must hold a list of rows")
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
