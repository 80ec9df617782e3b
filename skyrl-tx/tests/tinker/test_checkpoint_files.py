from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tx_server import CHILD_ENVIRONMENT

from tx.tinker.checkpoint_files import (
    checked_name,
    checkpoint_folder,
    delete_folder,
    give_name,
    parse_path,
    put_back,
    snapshot_folder,
    write_folder,
)
from tx.tinker.config import TxConfig
from tx.tinker.types import UserError

MODEL = "0f5c-ab:train:12"
BASE = Path("/state")
CONFIG = TxConfig(base_model="m", checkpoints_base=BASE)


def test_a_path_is_a_folder() -> None:
    path = f"tinker://{MODEL}/sampler_weights/000001"
    assert str(parse_path(path)) == path
    assert checkpoint_folder(CONFIG, path) == BASE / "0f5c-ab_train_12" / "sampler_weights" / "000001"


@given(st.one_of(st.text(), st.from_regex(r"tinker://[a-z:./]{0,9}(/weights)?/[\w./\0]{0,9}", fullmatch=True)))
def test_no_path_leads_out_of_the_folder(path: str) -> None:
    try:
        folder = checkpoint_folder(CONFIG, path)
    except UserError:
        return
    assert folder.resolve().relative_to(BASE.resolve()).parts == (*folder.parts[-3:],)


@given(st.text(max_size=300))
def test_no_name_leads_out_of_the_folder(name: str) -> None:
    try:
        checked = checked_name(name)
    except UserError:
        return
    assert len(checkpoint_folder(CONFIG, f"tinker://{MODEL}/weights/{checked}").relative_to(BASE).parts) == 3


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\0b", "a" * 256, ".hidden", "é", "a\n", "a b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UserError, match="cannot name a checkpoint"):
        checked_name(name)


@pytest.mark.parametrize("name", ["0001", "final", "step-1_of.9", "a" * 255])
def test_names(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize(
    "path",
    ["", "tinker://", f"tinker://{MODEL}/0001", f"tinker://{MODEL}/logs/0001", "tinker://../weights/x", "file:///x"],
)
def test_paths_that_are_none(path: str) -> None:
    with pytest.raises(UserError, match="is no path of a checkpoint"):
        parse_path(path)


def test_deleting(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_text("x")
    delete_folder(folder)
    assert list(tmp_path.iterdir()) == []
    delete_folder(folder)


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_folder_is_complete_or_absent(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "there"
    write_folder(folder, lambda new: (new / "file").write_text("first"))
    assert files(folder) == {"file": "first"}

    def fail(new: Path) -> None:
        (new / "file").write_text("second")
        raise OSError("by test")

    with pytest.raises(OSError, match="by test"):
        write_folder(folder, fail)
    assert files(folder) == {"file": "first"}
    write_folder(folder, lambda new: (new / "other").write_text("third"))
    assert files(folder) == {"other": "third"}
    assert [path.name for path in folder.parent.iterdir()] == ["there"]


def test_a_folder_stays_until_another_has_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    write_folder(folder, lambda new: (new / "file").write_text("first"))
    with pytest.raises(FileNotFoundError):
        give_name(tmp_path / "gone", folder)
    assert files(folder) == {"file": "first"}
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_was_moved_aside_is_put_back(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f".replaced-{name}" / name).mkdir(parents=True)
        (tmp_path / f".replaced-{name}" / name / "file").write_text("old")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").write_text("new")
    put_back(tmp_path)
    assert {path.name: files(path) for path in tmp_path.iterdir()} == {"a": {"file": "old"}, "b": {"file": "new"}}


FILLING = """
import resource, sys
import numpy as np
from pathlib import Path
from safetensors.numpy import save_file
from tx.tinker.checkpoint_files import write_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_folder(Path(sys.argv[1]), lambda new: save_file({"a": np.zeros(100_000)}, new / "file"))
except OSError as error:
    assert "File too large" in str(error), error
    sys.exit(7)
"""


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FILLING, str(tmp_path / "there")]
    assert subprocess.run(command, env=CHILD_ENVIRONMENT, check=False).returncode == 7
    assert list(tmp_path.iterdir()) == []


def test_snapshots_are_by_session() -> None:
    config = TxConfig(base_model="m", checkpoints_base=Path("/base"))
    assert snapshot_folder(config, "a-b:sample:7") == Path("/base/snapshots/a-b/7")
