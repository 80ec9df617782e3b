"""Comparison of runs by what they log and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

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
