"""Weights to sample from are immutable, loaded on demand, and evicted when they are deleted."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tx_kit.engines import Desk

from tx.tinker.engine import samplers as module
from tx.tinker.store.checkpoint_files import checkpoint_folder, delete_folder, snapshot_folder
from tx.tinker.types import UserError
from tx.tinker.wire.sample_job import SampleWeights


@pytest.fixture
def read(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that the backend has read so far."""
    folders: list[Path] = []
    load: Callable[[Path], Any] = desk.backend.load_weights
    monkeypatch.setattr(desk.backend, "load_weights", lambda folder: folders.append(folder) or load(folder))
    return folders


def save(desk: Desk, model: str, name: str = "x") -> SampleWeights:
    desk.save(model, name, overwrite=True)
    desk.work()
    return SampleWeights(base_model="m", model_path=f"tinker://{model}/weights/{name}")


def save_snapshot(desk: Desk, model: str, number: int = 0) -> SampleWeights:
    desk.save_for_sampler(model, sampling_session_seq_id=number)
    desk.work()
    return SampleWeights(base_model="m", snapshot=f"s:sample:{number}")


def test_weights_are_read_once_until_they_are_overwritten(desk: Desk, model: str, read: list[Path]) -> None:
    weights = save(desk, model)
    found = [desk.engine._samplers.find(weights) for _ in range(3)]
    assert found[0] is found[1] is found[2]
    assert len(read) == 1
    assert desk.engine._samplers.find(save(desk, model)) is not found[0]
    assert len(read) == 2


def test_recently_used_weights_stay_in_memory(
    desk: Desk, model: str, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = (save(desk, model, name) for name in "abc")
    folder = checkpoint_folder(desk.config, str(a.model_path))
    size = sum(file.stat().st_size for file in folder.iterdir())
    monkeypatch.setattr(module, "MAX_BYTES", size * 5 // 2)
    for weights in (a, b, a, c, a, b):
        desk.engine._samplers.find(weights)
    assert [folder.name for folder in read] == ["a", "b", "c", "b"]


def test_deleted_weights_are_evicted(desk: Desk, model: str) -> None:
    samplers = desk.engine._samplers
    snapshot, saved = save_snapshot(desk, model), save(desk, model)
    samplers.find(saved)
    delete_folder(snapshot_folder(desk.config, "s:sample:0"))
    desk.report()
    assert list(samplers._in_memory) == [checkpoint_folder(desk.config, str(saved.model_path))]
    with pytest.raises(UserError, match="there are no weights s:sample:0; unnamed weights are deleted"):
        samplers.find(snapshot)


@pytest.mark.parametrize(("limit", "maximum", "kept"), [("MAX_IN_MEMORY", 2, ["1", "2"]), ("MAX_BYTES", 1, ["2"])])
def test_snapshots_in_memory_are_limited(
    desk: Desk, model: str, monkeypatch: pytest.MonkeyPatch, limit: str, maximum: int, kept: list[str]
) -> None:
    monkeypatch.setattr(module, limit, maximum)
    for number in range(3):
        save_snapshot(desk, model, number)
    assert [folder.name for folder in desk.engine._samplers._in_memory] == kept


def test_used_snapshots_are_kept(desk: Desk, model: str) -> None:
    snapshot = save_snapshot(desk, model)
    folder = snapshot_folder(desk.config, "s:sample:0")
    os.utime(folder, (0, 0))
    desk.engine._samplers.find(snapshot)
    assert time.time() - folder.stat().st_mtime < 60
