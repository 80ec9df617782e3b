from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from tx_engine import SETTINGS, Desk

from tx.models.fingerprint import fingerprint
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.backends.jax.config import JaxConfig
from tx.tinker.engine.base_weights import OtherWeightsError


@pytest.fixture
def changed(tmp_path: Path, tiny_model: Path) -> Path:
    """The model with other norms."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "changed"))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1}, folder / "model.safetensors")
    return folder


def backend_of(folder: Path, name: str) -> JaxBackend:
    return JaxBackend(folder, name, JaxConfig(**SETTINGS))


def test_a_name_stands_for_the_same_weights(desk: Desk, tmp_path: Path, tiny_model: Path, changed: Path) -> None:
    moved = Path(shutil.copytree(tiny_model, tmp_path / "moved"))
    (moved / "README.md").write_text("the same weights")
    for folder in (tiny_model, moved):
        desk.start(backend_of(folder, "org/tiny"))
        desk.engine.run(lambda: True)
    desk.start(backend_of(changed, "org/tiny"))
    with pytest.raises(OtherWeightsError, match=r"changed has other weights than what was served as org/tiny before"):
        desk.engine.run(lambda: True)
    desk.start(backend_of(changed, "org/other"))
    desk.engine.run(lambda: True)


def test_a_fingerprint_does_not_depend_on_files(tmp_path: Path, tiny_model: Path, changed: Path) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    names = sorted(tensors)
    for number, some in enumerate((names[:3], names[3:])):
        save_file({name: tensors[name] for name in some}, tmp_path / f"model-{number}.safetensors", {"format": "np"})
    assert fingerprint(tmp_path) == fingerprint(tiny_model)
    assert fingerprint(changed) != fingerprint(tiny_model)
