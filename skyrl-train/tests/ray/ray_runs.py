"""Comparison of runs by what they log and export."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import find_descendants

N_STEPS = 5
EXACT = 1e-5


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the logged metrics without timings."""
    timed = ("timing/", "trainer/tokens_per_second")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: v for name, v in json.loads(line).items() if not name.startswith(timed)} for line in lines]


def weights(folder: Path, role: str = "policy") -> dict[str, torch.Tensor]:
    return load_file(folder / f"export/global_step_{N_STEPS}/{role}/model.safetensors")


def assert_same_run(folder: Path, expected: Path, *roles: str) -> None:
    """Assert that two runs have the same losses, rewards and final weights up to rounding."""
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(N_STEPS + 1))
    for row, expected_row in zip(rows, metrics(expected), strict=True):
        row = {name: value for name, value in row.items() if not name.startswith("sync/")}
        assert row == pytest.approx(expected_row, rel=EXACT, abs=EXACT)
    for role in roles:
        for name, tensor in weights(expected, role).items():
            torch.testing.assert_close(weights(folder, role)[name], tensor, rtol=0, atol=EXACT, msg=f"{role} {name}")


@contextmanager
def killing_an_engine(folder: Path) -> Iterator[None]:
    """Kill an engine of the run in `folder` once it has logged its first step."""
    log = folder / "metrics.jsonl"
    killed: list[int] = []

    def kill() -> None:
        while not log.exists() or len(log.read_text().splitlines()) < 2:
            time.sleep(0.02)
        engine = next(find_descendants("EngineActor"))
        killed.append(engine.pid)
        engine.kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    yield
    killer.join(timeout=10)
    assert killed
