"""Checks of a run before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.entrypoints.preflight import find_folder_fault


def test_a_folder_that_exists_or_can_be_created_has_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$cash").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in (str(tmp_path), "new/folder", "$cash/new", "$", "link/new", "ünï code", "n" * 255):
        assert find_folder_fault(folder) is None, folder
    assert {entry.name for entry in tmp_path.iterdir()} == {"$cash", "link"}, "a check creates nothing"


@pytest.mark.parametrize(
    ("folder", "fault"),
    [
        ("file", "{0}/file is not a folder"),
        ("file/below", "{0}/file is not a folder"),
        ("dangling/below", "{0}/dangling is a broken link"),
        ("$UNSET_VARIABLE", "the environment variable $UNSET_VARIABLE is not set"),
        ("a/${UNSET_VARIABLE}/b", "the environment variable ${{UNSET_VARIABLE}} is not set"),
        ("~no_such_user/x", "there is no user no_such_user"),
        ("n" * 256, "names of files have at most 255 bytes"),
        ("ü" * 128, "names of files have at most 255 bytes"),
        ("d/" * 2000, "paths have at most 4,096 bytes, and those of files in it have up to 300 more"),
        ("nul\0", "it contains a NUL character"),
        ("half\ud83d", "it contains a lone surrogate"),
    ],
)
def test_a_folder_that_cannot_be_written_has_a_fault(
    folder: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert find_folder_fault(folder) == fault.format(tmp_path)


def test_a_folder_of_another_user_is_read_only() -> None:
    script = (
        "import os; from skyrl_train.entrypoints.preflight import find_folder_fault\n"
        "os.getuid() or os.setuid(65534)\n"
        "print(find_folder_fault('/usr/runs'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "/usr is read-only for this user\n"
