"""Small datasets of prompts, answers and preferences."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_train.config.supervised import PreferenceDataConfig, SFTDataConfig
from skyrl_train.dataset.demonstrations import Demonstration, read_answers
from skyrl_train.dataset.files import JoinedRows, write_jsonl

CHAT = {
    "messages": [
        {"role": "user", "content": "Play"},
        {"role": "assistant", "content": "123"},
        {"role": "user", "content": "Again, and longer"},
        {"role": "assistant", "content": "4567890"},
    ]
}
"""A row with two answers."""


def write_rows(folder: Path, rows: Sequence[Any], name: str = "rows.jsonl") -> str:
    """Write a file in the format of its name, and return its path."""
    file = folder / name
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows), encoding="utf-8")
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def read_demonstrations(
    path: str, data: SFTDataConfig | PreferenceDataConfig, text_model: str | None = None
) -> list[tuple[Demonstration, ...]]:
    """Return the answers of each row of a file: one to imitate, or a chosen and a rejected one.

    `text_model` is the name of a model that reads only text.
    """
    rows = JoinedRows([path])
    return list(read_answers(rows, range(len(rows)), data, lambda: text_model))


def prompt_row(text: str, env_class: str | None = None, **columns: Any) -> dict[str, Any]:
    """Return a row that asks `text`, for an environment or for the default one of the run."""
    environment = {} if env_class is None else {"env_class": env_class}
    return {"prompt": [{"role": "user", "content": text}], **environment, **columns}


def write_prompts(file: Path, n_rows: int, env_class: str | None = None, **columns: Any) -> Path:
    """Write rows that ask to say 0, 1, …; return the file."""
    write_jsonl(file, [prompt_row(f"say {i}", env_class, **columns) for i in range(n_rows)])
    return file


def write_answers(folder: Path) -> Path:
    """Write 11 training rows, some with two turns, and 3 validation rows; return the folder."""
    rows = [{"prompt": f"{n} plus 1?", "response": f"It is {n + 1}" + " indeed" * (n % 4)} for n in range(12)]
    write_jsonl(folder / "train.jsonl", [*rows[:10], CHAT])
    write_jsonl(folder / "val.jsonl", [*rows[10:], CHAT])
    return folder


def write_pairs(folder: Path) -> Path:
    """Write 9 pairs of answers to train on and 3 to validate on; return the folder."""
    rows = [
        {
            "prompt": f"{n} plus 1?",
            "chosen": f"It is {n + 1}" + " indeed" * (n % 4),
            "rejected": "I do not know" * (n % 3) or "No",
        }
        for n in range(12)
    ]
    write_jsonl(folder / "train.jsonl", rows[:9])
    write_jsonl(folder / "val.jsonl", rows[9:])
    return folder
