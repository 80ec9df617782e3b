import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from tx_kit.engines import Desk

from tx.models.config import INDEX, SINGLE, ModelError
from tx.tinker.db_models import ClientSession, Model, ModelStatus, SessionStatus
from tx.tinker.engine.base_weights import check_weights, fingerprint


@pytest.fixture
def changed(tmp_path: Path, minimal_model: Path) -> Path:
    """The model with other norms."""
    folder = Path(shutil.copytree(minimal_model, tmp_path / "changed"))
    tensors = load_file(folder / SINGLE)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1}, folder / SINGLE)
    return folder


def test_a_name_is_bound_to_its_weights(desk: Desk, tmp_path: Path, minimal_model: Path, changed: Path) -> None:
    check_weights(desk.database, "org/tiny", changed)
    check_weights(desk.database, "org/tiny", minimal_model)  # nothing was trained on the other weights
    model = desk.model()
    check_weights(desk.database, "org/tiny", Path(shutil.copytree(minimal_model, tmp_path / "moved")))
    with pytest.raises(ModelError, match=r"changed has different weights from those that were served as org/tiny"):
        check_weights(desk.database, "org/tiny", changed)
    check_weights(desk.database, "org/other", changed)
    desk.set(Model, model, status=ModelStatus.UNLOADED)
    desk.set(ClientSession, "s", status=SessionStatus.FINISHED)
    check_weights(desk.database, "org/tiny", changed)  # nothing is left of it


def test_a_fingerprint_depends_on_the_weights_only(tmp_path: Path, minimal_model: Path, changed: Path) -> None:
    tensors = load_file(minimal_model / SINGLE)
    names = sorted(tensors)
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file, {"format": "np"})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    save_file({"lora_A": tensors[names[0]]}, tmp_path / "adapter_model.safetensors")
    assert fingerprint(tmp_path) == fingerprint(minimal_model)
    assert fingerprint(changed) != fingerprint(minimal_model)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-1\.safetensors, which model\.safetensors\.index\.json lists"):
        fingerprint(tmp_path)


def test_invalid_files(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) is None
    for content in (b"", b"version https://git-lfs", (5).to_bytes(8, "little") + b"[}..."):
        (tmp_path / SINGLE).write_bytes(content)
        with pytest.raises(
            ModelError, match=r"model\.safetensors is not a valid safetensors file; check that the download is complete"
        ):
            fingerprint(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ModelError, match="is not a valid safetensors index: KeyError"):
        fingerprint(tmp_path)
