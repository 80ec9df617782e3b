from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from tx_engine import Desk

from tx.models.fingerprint import fingerprint
from tx.tinker.engine.base_weights import check_weights


@pytest.fixture
def changed(tmp_path: Path, tiny_model: Path) -> Path:
    """The model with other norms."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "changed"))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1}, folder / "model.safetensors")
    return folder


def test_a_name_stands_for_the_same_weights(desk: Desk, tmp_path: Path, tiny_model: Path, changed: Path) -> None:
    moved = Path(shutil.copytree(tiny_model, tmp_path / "moved"))
    (moved / "README.md").write_text("the same weights")
    base = desk.backend.base_model
    for folder in (tiny_model, moved):
        check_weights(desk.database, replace(base, folder=folder))
    with pytest.raises(ValueError, match=r"changed has other weights than what was served as org/tiny before"):
        check_weights(desk.database, replace(base, folder=changed))
    check_weights(desk.database, replace(base, name="org/other", folder=changed))


def test_a_fingerprint_does_not_depend_on_files(tmp_path: Path, tiny_model: Path, changed: Path) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    names = sorted(tensors)
    for number, some in enumerate((names[:3], names[3:])):
        save_file({name: tensors[name] for name in some}, tmp_path / f"model-{number}.safetensors", {"format": "np"})
    assert fingerprint(tmp_path) == fingerprint(tiny_model)
    assert fingerprint(changed) != fingerprint(tiny_model)
