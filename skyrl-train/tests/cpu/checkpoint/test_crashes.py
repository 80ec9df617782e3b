"""A save interrupted at any operating-system call leaves a complete checkpoint to resume from."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from train_kit.checkpoints import FILES, read, save, write_named

from skyrl_train.checkpoint import CheckpointStore
from skyrl_train.checkpoint.manifest import MANIFEST
from skyrl_train.checkpoint.store import POINTER
from skyrl_train.errors import CheckpointError

CALLS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")


class Killed(BaseException):
    """The end of the process. No code may catch it."""


class Saboteur:
    """Fault injection that lets `n_calls` operating-system calls and file writes pass and fails the next one."""

    def __init__(self, n_calls: int, failure: BaseException) -> None:
        self.n_left = n_calls
        self._failure = failure

    def tick(self) -> None:
        if self.n_left == 0:
            raise self._failure
        self.n_left -= 1

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return call(*args, **kwargs)

        return checked

    @contextmanager
    def active(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self.before(getattr(os, name)))
            patch.setattr(Path, "write_text", lambda path, text, encoding: self.write_text(path, text))
            yield

    def write_text(self, path: Path, text: str) -> None:
        """Write a file in two steps, because a crash may leave it empty."""
        path.touch()
        self.tick()
        with path.open("w") as file:
            file.write(text)


SCENES: dict[str, tuple[dict[int, str], int]] = {
    "first save": ({}, -1),
    "second save": ({10: "ten"}, -1),
    "keep one": ({8: "eight", 10: "ten"}, 1),
    "repeated step": ({10: "ten", 20: "old twenty"}, 2),
    "earlier step": ({20: "old twenty", 30: "thirty", 15: "fifteen"}, 2),
    "full disk": ({8: "eight", 10: "ten"}, 1),  # all checkpoints but the last are removed first
    "after a crash": ({10: "ten", 20: "old twenty"}, 2),  # with leftovers of crashes at every point
}
"""The checkpoints that are saved before step 20, in this order, and the number to keep."""


def set_up(scene: str, folder: Path) -> CheckpointStore:
    saved, max_to_keep = SCENES[scene]
    for step, name in saved.items():
        save(CheckpointStore(folder), step, write_named(name))
    if scene == "after a crash":
        for name in (".global_step_20.partial", ".global_step_10.removed.partial", ".global_step_10.replaced"):
            (folder / name).mkdir()
            (folder / name / FILES[0]).write_text("half")
        (folder / "global_step_20").rename(folder / ".global_step_20.replaced")
        (folder / f".{POINTER}.partial").touch()
    return CheckpointStore(folder, max_to_keep)


@pytest.mark.parametrize(
    ("scene", "failure"),
    [
        *((scene, Killed()) for scene in SCENES),
        *((scene, OSError(5, "Input/output error")) for scene in ("second save", "keep one", "repeated step")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_crash_at_any_call_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, scene: str, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a killed process loses no written data
    if scene == "full disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    latest_names = set()
    for n_calls in range(200):
        folder = tmp_path / str(n_calls)
        store = set_up(scene, folder)
        before = latest_name(folder) if scene != "after a crash" else "old twenty"
        saboteur = Saboteur(n_calls, failure)
        is_done = save_with(saboteur, store)
        after = latest_name(folder)
        latest_names.add(after)
        assert after in {before, "twenty"}
        assert after == "twenty" or not is_done
        save(CheckpointStore(folder, max_to_keep=1), 25, write_named("twenty-five"))
        assert latest_name(folder) == "twenty-five"
        assert {entry.name for entry in folder.iterdir()} == {"global_step_25", POINTER}
        if is_done and saboteur.n_left > 0:
            break
    assert n_calls > 10
    assert latest_names == {before, "twenty"}


def save_with(saboteur: Saboteur, store: CheckpointStore) -> bool:
    """Save step 20 and return True if it succeeded."""
    try:
        with saboteur.active():
            save(store, 20, write_named("twenty", halfway=saboteur.tick), expected_bytes=1)
    except (Killed, CheckpointError):
        return False
    return True


def latest_name(folder: Path) -> str | None:
    """Return the name of the checkpoint to resume from; assert that all checkpoints are complete."""
    store = CheckpointStore(folder)
    latest = store.latest()
    for step in store.steps():
        read(folder / f"global_step_{step}")
    return None if latest is None else read(latest)


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the syncs, with paths relative to `tmp_path`, and the renames, with the new name, in order."""
    events: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def log_fsync(descriptor: int) -> None:
        events.append(("sync", os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)))
        fsync(descriptor)

    def log_rename(source: Path, target: Path) -> None:
        events.append(("rename", Path(target).name))
        rename(source, target)

    def log_replace(source: Path, target: Path) -> None:
        events.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "rename", log_rename)
    monkeypatch.setattr(os, "replace", log_replace)
    return events


def test_files_are_synced_before_renames_and_the_pointer(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    """A power cut keeps only synced data, so the order is files, folders, rename, pointer."""
    save(CheckpointStore(tmp_path), 5, write_named("five"))
    partial = ".global_step_5.partial"
    written = [*(f"{partial}/{file}" for file in (*FILES, MANIFEST)), f"{partial}/policy", partial]
    assert sorted(events[: len(written)]) == sorted(("sync", path) for path in written)
    assert events[len(written) :] == [
        ("rename", "global_step_5"),
        ("sync", "."),
        ("sync", f".{POINTER}.partial"),
        ("rename", POINTER),
        ("sync", "."),
    ]


def test_new_parent_folders_are_synced_before_the_rename(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    save(CheckpointStore(tmp_path / "project/run/ckpts"), 5, write_named("five"))
    before = events[: events.index(("rename", "global_step_5"))]
    assert {("sync", folder) for folder in (".", "project", "project/run")} <= set(before)
