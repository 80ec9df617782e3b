from __future__ import annotations

import gc
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_gym.envs.registration import registry
from skyrl_gym.worker_pool import Worker


def pytest_collection_finish() -> None:
    """What was imported for all tests stays, and is not looked at by each `gc.collect` again, which took a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Every test starts from an empty registry and leaves behind the one it found."""
    before = dict(registry)
    registry.clear()
    yield
    registry.clear()
    registry.update(before)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A shop's."""
    file = tmp_path / "sho?p" / "sho?p.sqlite"  # a name with a meaning in addresses
    file.parent.mkdir()
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE goods (id INTEGER, name TEXT, price REAL)")
        connection.executemany(
            "INSERT INTO goods VALUES (?, ?, ?)", [(2, "pen", 1.5), (1, "ink", 4.0), (2, "pen", 1.5)]
        )
        connection.execute("INSERT INTO goods VALUES (3, CAST(x'ff' AS TEXT), NULL)")
    connection.close()
    return file


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """A semaphore that is released for each question to a worker that has started."""
    asked = threading.Semaphore(0)
    ask = Worker.ask

    def recording(worker: Worker, question: list[Any], limit_s: float) -> dict[str, Any]:
        asked.release()
        return ask(worker, question, limit_s)

    monkeypatch.setattr(Worker, "ask", recording)
    return asked
