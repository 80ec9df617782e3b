"""Dataset rows for environments without a trainer, read and split as in training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_gym.data.files import SUFFIXES, open_file
from skyrl_gym.data.images import place_prompt_images, read_images
from skyrl_gym.envs.base_text_env import ConversationType
from skyrl_gym.envs.row import read_max_turns
from skyrl_gym.runtime.validation import is_conversation

DEFAULT_MAX_TURNS = 10


def read_row(path: Path, index: int) -> dict[str, Any]:
    """Return row `index` of a `.parquet`, `.json` or `.jsonl` file, with its images in the prompt.

    Raises:
        UnreadableData: the file cannot be read, or the row is invalid.
        ValueError: the format is not supported, or the file has no such row.
        ImportError: the file is Parquet and pyarrow is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--data {path} is not supported; use a .parquet, .json or .jsonl file")
    rows = open_file(str(path), path, "--data")
    if not 0 <= index < len(rows):
        raise ValueError(f"--row {index}: {path} has " + (f"rows 0 to {len(rows) - 1}" if len(rows) else "no rows"))
    (row,) = rows.read([index])
    if is_conversation(row.get("prompt")):
        place_prompt_images(row, rows.location(index), "prompt", find_text_model=lambda: None)
        row["prompt"] = read_images(row["prompt"], rows.location(index), rows.folder)
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
