import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_kit.databases import write_database
from gym_kit.processes import KIT
from gym_kit.servers import ModelServer, run_model_server

from skyrl_gym.envs.registration import registry
from skyrl_gym.worker_pool import PoolWorker


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Give every test an empty registry, and restore the previous one afterwards."""
    before = dict(registry)
    registry.clear()
    yield
    registry.clear()
    registry.update(before)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    goods = "(2, 'pen', 1.5), (1, 'ink', 4.0), (2, 'pen', 1.5), (3, CAST(x'ff' AS TEXT), NULL)"
    script = f"CREATE TABLE goods (id INTEGER, name TEXT, price REAL); INSERT INTO goods VALUES {goods}"
    return write_database(tmp_path / "sho?p" / "sho?p.sqlite", script)  # "?" is special in URIs


@pytest.fixture(autouse=True)
def clear_game_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the user's choice of OpenSpiel games."""
    monkeypatch.delenv("GAME_TYPES", raising=False)


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    """Run a server of chat completions on a free local port during the test."""
    with run_model_server() as server:
        yield server


@pytest.fixture
def verifiers_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `verifiers_packages` of the kit importable, in this process and in its children."""
    monkeypatch.syspath_prepend(KIT / "gym_kit" / "verifiers_packages")
    monkeypatch.setenv("PYTHONPATH", str(KIT / "gym_kit" / "verifiers_packages"))


@pytest.fixture
def question_semaphore(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Return a semaphore that is released for each question to a running worker."""
    asked = threading.Semaphore(0)
    ask = PoolWorker.ask

    def recording(worker: PoolWorker, question: list[Any], limit_s: float) -> dict[str, Any]:
        asked.release()
        return ask(worker, question, limit_s)

    monkeypatch.setattr(PoolWorker, "ask", recording)
    return asked
