from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STAND_IN = Path(__file__).parents[2] / "fleet_stand_in"


@pytest.fixture
def openenv(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install the stand-in for OpenEnv, and return its class."""
    forget_envs()
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("FLEET_API_KEY", "test")
    from envs.fleet_env.task_env import FleetTaskEnv

    FleetTaskEnv.faults = random.Random(0)
    yield FleetTaskEnv
    forget_envs()


def forget_envs() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "envs"]:
        del sys.modules[name]
