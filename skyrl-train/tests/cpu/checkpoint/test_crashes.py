"""A save that stops anywhere, in any operating-system call, leaves a complete checkpoint to resume from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoint.folders import FILES, content_of, read, save

from skyrl_train.checkpoint import CheckpointStore
from skyrl_train.checkpoint.store import POINTER
from skyrl_train.errors import CheckpointError

CALLS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")


class Killed(BaseException):
    """The process ends here; nothing in the code may catch it."""


class Saboteur:
    """Lets `n_calls` operating-system calls and file writes pass, and fails the next."""

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
    def at_work(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self.before(getattr(os, name)))
            patch.setattr(Path, "write_text", lambda path, text, encoding: self.write_text(path, text))
            yield

    def write_text(self, path: Path, text: str) -> None:
        """A crash may leave an empty file."""
        path.touch()
        self.tick()
        with path.open("w") as file:
            file.write(text)


def first(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder)


def second(folder: Path) -> CheckpointStore:
    save(CheckpointStore(folder), 10, content_of("ten"))
    return CheckpointStore(folder)


def keeping_one(folder: Path) -> CheckpointStore:
    for step, name in ((8, "eight"), (10, "ten")):
        save(CheckpointStore(folder), step, content_of(name))
    return CheckpointStore(folder, max_to_keep=1)


def same_step_again(folder: Path) -> CheckpointStore:
    for step, name in ((10, "ten"), (20, "old twenty")):
        save(CheckpointStore(folder), step, content_of(name))
    return CheckpointStore(folder, max_to_keep=2)


def after_going_back(folder: Path) -> CheckpointStore:
    for step, name in ((20, "old twenty"), (30, "thirty"), (15, "fifteen")):
        save(CheckpointStore(folder), step, content_of(name))
    return CheckpointStore(folder, max_to_keep=2)


def on_a_full_disk(folder: Path) -> CheckpointStore:
    """No space is ever free, so that everything but the last checkpoint goes first."""
    return keeping_one(folder)


def after_a_crash(folder: Path) -> CheckpointStore:
    """The leftovers of crashes at every place."""
    store = same_step_again(folder)
    for name in (".global_step_20.partial", ".global_step_10.removed.partial", ".global_step_10.replaced"):
        (folder / name).mkdir()
        (folder / name / FILES[0]).write_text("half")
    (folder / "global_step_20").rename(folder / ".global_step_20.replaced")
    (folder / f".{POINTER}.partial").touch()
    return store


KILLED = [first, second, keeping_one, same_step_again, after_going_back, on_a_full_disk, after_a_crash]
REFUSED = [second, keeping_one, same_step_again]


@pytest.mark.parametrize(
    ("scene", "failure"),
    [(scene, Killed()) for scene in KILLED] + [(scene, OSError(5, "Input/output error")) for scene in REFUSED],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_crash_anywhere_leaves_the_earlier_checkpoint_or_the_new_one(
    tmp_path: Path, scene: Callable[[Path], CheckpointStore], failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a killed process loses nothing that was written
    if scene is on_a_full_disk:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    seen = set()
    for n_calls in range(200):
        folder = tmp_path / str(n_calls)
        store = scene(folder)
        before = latest_name(folder) if scene is not after_a_crash else "old twenty"
        saboteur = Saboteur(n_calls, failure)
        is_done = save_with(saboteur, store)
        after = latest_name(folder)
        seen.add(after)
        assert after in {before, "twenty"}
        assert after == "twenty" or not is_done
        save(CheckpointStore(folder, max_to_keep=1), 25, content_of("twenty-five"))
        assert latest_name(folder) == "twenty-five"
        assert {entry.name for entry in folder.iterdir()} == {"global_step_25", POINTER}
        if is_done and saboteur.n_left > 0:
            break
    assert n_calls > 10
    assert seen == {before, "twenty"}


def save_with(saboteur: Saboteur, store: CheckpointStore) -> bool:
    """Whether the save of step 20 went through."""
    try:
        with saboteur.at_work():
            save(store, 20, content_of("twenty", halfway=saboteur.tick), expected_bytes=1)
    except (Killed, CheckpointError):
        return False
    return True


def latest_name(folder: Path) -> str | None:
    """What a new process would resume from; everything else that has a name is complete as well."""
    store = CheckpointStore(folder)
    latest = store.latest()
    for step in store.steps():
        read(folder / f"global_step_{step}")
    return None if latest is None else read(latest)


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Syncs, with the path below `tmp_path`, and renames, with the new name, in order."""
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


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    """A power cut keeps what was synced: files, then their folders, then the rename, then the pointer."""
    save(CheckpointStore(tmp_path), 5, content_of("five"))
    partial = ".global_step_5.partial"
    written = [*(f"{partial}/{file}" for file in FILES), f"{partial}/policy", partial]
    assert sorted(events[: len(written)]) == sorted(("sync", path) for path in written)
    assert events[len(written) :] == [
        ("rename", "global_step_5"),
        ("sync", "."),
        ("sync", f".{POINTER}.partial"),
        ("rename", POINTER),
        ("sync", "."),
    ]


def test_new_folders_above_a_checkpoint_are_on_disk_before_it_gets_its_name(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    save(CheckpointStore(tmp_path / "project/run/ckpts"), 5, content_of("five"))
    before = events[: events.index(("rename", "global_step_5"))]
    assert {("sync", folder) for folder in (".", "project", "project/run")} <= set(before)
