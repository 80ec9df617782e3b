import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tx_kit.processes import start_python

from tx.tinker.config import TxConfig
from tx.tinker.store.checkpoint_files import (
    check_name,
    checkpoint_folder,
    parse_path,
    rename_into_place,
    restore_replaced,
    write_folder,
)
from tx.tinker.types import UserError

MODEL = "0f5c-ab:train:12"
BASE = Path("/state")
CONFIG = TxConfig(base_model="m", checkpoints_base=BASE)


def test_a_path_maps_to_a_folder() -> None:
    path = f"tinker://{MODEL}/sampler_weights/000001"
    assert str(parse_path(path)) == path
    assert checkpoint_folder(CONFIG, path) == BASE / "0f5c-ab_train_12" / "sampler_weights" / "000001"


@given(st.from_regex(rf"tinker://({MODEL}|[a-z:./]{{0,9}})(/weights)?/[\w./\0]{{0,9}}|(?s:.*)", fullmatch=True))
def test_no_path_escapes_the_folder(path: str) -> None:
    try:
        folder = checkpoint_folder(CONFIG, path)
    except UserError:
        return
    assert folder.resolve().relative_to(BASE.resolve()).parts == (*folder.parts[-3:],)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\0b", "a" * 256, ".hidden", "é", "a\n", "a b"])
def test_invalid_names(name: str) -> None:
    with pytest.raises(UserError, match="cannot name a checkpoint"):
        check_name(name)


@pytest.mark.parametrize(
    "path", ["", "tinker://", f"tinker://{MODEL}/1", f"tinker://{MODEL}/logs/1", "tinker://../weights/x"]
)
def test_invalid_paths(path: str) -> None:
    with pytest.raises(UserError, match="is not a checkpoint path"):
        parse_path(path)


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
    with pytest.raises(FileNotFoundError):
        rename_into_place(tmp_path / "gone", folder)
    assert files(folder) == {"other": "third"}
    assert [path.name for path in folder.parent.iterdir()] == ["there"]


def test_interrupted_replacements_are_undone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f".replaced-{name}" / name).mkdir(parents=True)
        (tmp_path / f".replaced-{name}" / name / "file").write_text("old")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").write_text("new")
    restore_replaced(tmp_path)
    assert {path.name: files(path) for path in tmp_path.iterdir()} == {"a": {"file": "old"}, "b": {"file": "new"}}


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order of syncs, renames and deletions in `tmp_path`, without the random parts of names."""
    recorded: list[str] = []

    def shown(path: str | Path) -> str:
        parts = Path(path).relative_to(tmp_path).parts
        return "/".join(part.partition("-")[0] for part in parts) or "."

    def record(module: ModuleType, name: str, words: Callable[..., str]) -> None:
        real = getattr(module, name)

        def recording(*args: Any, **options: Any) -> None:
            recorded.append(words(*args))
            real(*args, **options)

        monkeypatch.setattr(module, name, recording)

    record(shutil, "rmtree", lambda folder: f"delete {shown(folder)}")
    record(os, "fsync", lambda descriptor: f"sync {shown(os.readlink(f'/proc/self/fd/{descriptor}'))}")
    record(os, "rename", lambda source, target: f"rename {shown(source)} to {shown(target)}")
    return recorded


def write_two_files(folder: Path) -> None:
    (folder / "deep").mkdir()
    for file in (folder / "file", folder / "deep" / "file"):
        file.write_text("x")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are resolved on Linux alone")
def test_a_folder_is_synced_before_its_name_and_before_the_previous_one_is_deleted(
    tmp_path: Path, events: list[str]
) -> None:
    for _ in range(2):
        events.clear()
        write_folder(tmp_path / "there", write_two_files)
    contents, rest = events[:4], events[4:]
    written = [".unfinished/file", ".unfinished/deep/file", ".unfinished/deep", ".unfinished"]
    assert sorted(contents) == sorted(f"sync {path}" for path in written)
    assert rest == ["rename there to .replaced/there", "rename .unfinished to there", "sync .", "delete .replaced"]
    events.clear()
    write_folder(tmp_path / "model" / "weights" / "there", write_two_files)  # names are stored in parent folders
    assert events.index("sync .") < events.index("sync model") < events.index("sync model/weights")
    assert events[-2:] == ["sync model/weights", "delete model/weights/.replaced"]


FILLING = """
import resource, sys
import numpy as np
from pathlib import Path
from safetensors.numpy import save_file
from tx.tinker.store.checkpoint_files import write_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_folder(Path(sys.argv[1]), lambda new: save_file({"a": np.zeros(100_000)}, new / "file"))
except OSError as error:
    assert "File too large" in str(error), error
    sys.exit(7)
"""


def test_a_full_disk_raises_oserror(tmp_path: Path) -> None:
    assert start_python("-c", FILLING, str(tmp_path / "there")).wait(60) == 7
    assert list(tmp_path.iterdir()) == []
