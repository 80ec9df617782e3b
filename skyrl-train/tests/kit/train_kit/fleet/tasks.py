"""Task lists with the environments and counts of Fleet's export, and datasets made from them."""

import json
from pathlib import Path
from typing import Any

from integrations.fleet import prepare_dataset

OPENENV = Path(__file__).with_name("openenv")
"""The folder of the stand-in for OpenEnv; on `sys.path`, it takes the package's place."""

COUNTS = {  # environment: tasks of tool_use, tasks of computer_use
    "github": (1865, 0),
    "booking": (1089, 0),
    "google-maps": (13, 739),
    "reddit": (246, 24),
    "ticketmaster": (222, 25),
    "amazon": (0, 145),
    "rops": (0, 113),
    "zillow": (76, 30),
    "walmart": (0, 82),
    "dmv": (0, 55),
    "fira": (54, 0),
    "google-flights": (0, 33),
    "instacart": (0, 32),
    "outlook": (24, 0),
    "hubspot": (12, 0),
    "dropbox": (2, 0),
}


def fleet_entries(counts: dict[str, tuple[int, int]] | None = None) -> list[dict[str, Any]]:
    """Return the entries of a task file."""
    return [
        {
            "key": f"{env_key}_{modality}_{i}",
            "env_id": env_key,
            "prompt": f"Task {i} in {env_key}.",
            "task_modality": modality,
            "difficulty": 1 + i % 3,
            "version": "v1",
            "verifier_code": "def verify(env): return 1.0",
        }
        for env_key, numbers in (counts or COUNTS).items()
        for modality, n_tasks in zip(("tool_use", "computer_use"), numbers, strict=True)
        for i in range(n_tasks)
    ]


def write_tasks(path: Path, entries: list[dict[str, Any]]) -> Path:
    """Write a task file and return its path."""
    path.write_text(json.dumps({"tasks": entries}), encoding="utf-8")
    return path


def write_dataset(folder: Path, counts: dict[str, tuple[int, int]], modality: str = "tool_use") -> Path:
    """Write `tasks.json`, and a dataset of its tasks in `data/`; return the task file."""
    tasks = write_tasks(folder / "tasks.json", fleet_entries(counts))
    prepare_dataset.main(["--tasks-json", str(tasks), "--output-dir", str(folder / "data"), "--modality", modality])
    return tasks
