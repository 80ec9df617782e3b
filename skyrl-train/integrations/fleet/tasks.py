"""Fleet tasks, read from the JSON file that Fleet exports."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from skyrl_train.errors import DataError

TOOL_USE = "tool_use"
MODALITIES = (TOOL_USE, "computer_use", "browser_use")
NEEDS_IMAGES = (
    "whose screenshots a text model cannot see; train a vision-language model with an engine that reads images, or "
    "prepare the dataset with --modality tool_use"
)


@dataclass(frozen=True, slots=True)
class FleetTask:
    """A task, e.g. of the environment `github` with the modality `tool_use`.

    `config` holds all fields of the file, under the names that OpenEnv reads. OpenEnv executes the verifier's code, so
    treat task files as programs.
    """

    key: str
    env_key: str
    modality: str
    prompt: str
    difficulty: int | None
    config: Mapping[str, Any]


def load_tasks(path: str | Path) -> tuple[list[FleetTask], list[str]]:
    """Return a file's tasks, the first of each key, and a sentence per entry that was left out.

    The file holds a list of tasks, or `{"tasks": [...]}`.

    Raises:
        DataError: the file cannot be read, or contains no task.
    """
    file = Path(os.path.expandvars(path)).expanduser()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"the task file {file} cannot be read: {error}; export it from Fleet again") from error
    entries = content.get("tasks") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise DataError(f'the task file {file} must hold a list of tasks, or {{"tasks": [...]}}')
    tasks: dict[str, FleetTask] = {}
    left_out = []
    for index, entry in enumerate(entries):
        try:
            task = _parse(entry)
        except DataError as error:
            left_out.append(f"entry {index}: {error}")
            continue
        if task.key in tasks:
            left_out.append(f"entry {index}: the key {task.key!r} occurs twice; its first entry counts")
        tasks.setdefault(task.key, task)
    if not tasks:
        raise DataError(f"the task file {file} holds no task: {left_out[0] if left_out else 'its list is empty'}")
    return list(tasks.values()), left_out


def tasks_by_key(path: str) -> Mapping[str, FleetTask]:
    """Return a file's tasks by key. The file is read again only if it has changed."""
    file = Path(os.path.expandvars(path)).expanduser()
    try:
        changed = file.stat().st_mtime_ns
    except OSError as error:
        raise DataError(f"the task file {file} cannot be read: {error}") from error
    return _tasks_by_key(str(file), changed)


@lru_cache(maxsize=4)
def _tasks_by_key(path: str, changed: int) -> Mapping[str, FleetTask]:
    return MappingProxyType({task.key: task for task in load_tasks(path)[0]})


def _parse(entry: Any) -> FleetTask:
    if not isinstance(entry, dict):
        raise DataError(f"{str(entry)[:80]!r} is not an object")
    values = {key: value for key, value in entry.items() if value is not None}
    key, env_key, version = (
        values.get(name) or values.get(alias)
        for name, alias in (("task_key", "key"), ("env_key", "env_id"), ("env_version", "version"))
    )
    for name, value in (("key", key), ("env_key", env_key), ("prompt", values.get("prompt"))):
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"task {key!r} has no {name}" if name != "key" else "it has no key")
    assert isinstance(key, str)
    assert isinstance(env_key, str)
    modality = values.get("task_modality", TOOL_USE)
    if modality not in MODALITIES:
        raise DataError(f"task {key!r} has task_modality={modality!r}; use one of {', '.join(MODALITIES)}")
    if not (values.get("verifier_code") or values.get("verifier_func")):
        raise DataError(f"task {key!r} has no verifier_code, so that nothing can grade it; export it with its verifier")
    names = {"task_key": key, "env_key": env_key, "task_modality": modality}
    names |= {"env_version": version} if version else {}
    difficulty = values.get("difficulty")
    if difficulty is not None and (isinstance(difficulty, bool) or not isinstance(difficulty, int)):
        raise DataError(f"task {key!r} has difficulty={difficulty!r}, which is not a whole number")
    return FleetTask(key, env_key, modality, values["prompt"], difficulty, MappingProxyType(values | names))
