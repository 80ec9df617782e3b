import asyncio
import logging
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest
from train_kit.checkpoints import FILES, N_BYTES, flip_a_bit, read, save, write_named

from skyrl_train.checkpoint import CheckpointStore
from skyrl_train.checkpoint.manifest import MANIFEST
from skyrl_train.checkpoint.store import POINTER, SPARE_BYTES
from skyrl_train.errors import CheckpointError

with TemporaryDirectory() as _folder:
    SIZE = sum(file.stat().st_size for file in save(CheckpointStore(Path(_folder)), 1, write_named("")).rglob("*.*"))
Usage = namedtuple("Usage", ["total", "used", "free"])


def save_all(store: CheckpointStore, *steps: int, expected_bytes: int = 0) -> None:
    for step in steps:
        save(store, step, write_named(f"step {step}"), expected_bytes)


def crash_during_save(store: CheckpointStore, step: int) -> list[int]:
    """Interrupt a save of `SIZE` bytes, and return the steps that were kept when it began to write."""
    kept: list[int] = []

    def crash(folder: Path) -> None:
        kept.extend(store.steps())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(store, step, crash, expected_bytes=SIZE)
    return kept


def resuming_from(store: CheckpointStore, step: int) -> CheckpointStore:
    return CheckpointStore(store.path, -1, "from_path", str(store.path / f"global_step_{step}"))


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync; test_crashes covers the order of syncs."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A store that keeps all checkpoints."""
    return CheckpointStore(tmp_path / "ckpts")


def test_a_saved_checkpoint_is_the_latest_and_complete(store: CheckpointStore) -> None:
    assert store.latest() is None
    folder = save(store, 10, write_named("ten"))
    assert folder == store.path / "global_step_10" == store.latest()
    assert read(folder) == "ten"
    assert sorted(entry.name for entry in store.path.iterdir()) == ["global_step_10", POINTER]
    assert (store.path / POINTER).read_text() == "10\n"


def test_steps_are_ordered_as_numbers_and_other_entries_are_ignored(store: CheckpointStore) -> None:
    save_all(store, 9, 100, 20)
    (store.path / "global_step_7_old").mkdir()
    (store.path / "notes.txt").touch()
    assert store.steps() == [9, 20, 100]
    assert store.latest() == store.path / "global_step_20"
    (store.path / POINTER).unlink()
    assert store.latest() == store.path / "global_step_100"


@pytest.mark.parametrize(("max_to_keep", "kept"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4]), (-1, [1, 2, 3, 4])])
def test_the_newest_checkpoints_are_kept(tmp_path: Path, max_to_keep: int, kept: list[int]) -> None:
    store = CheckpointStore(tmp_path, max_to_keep)
    save_all(store, 1, 2, 3, 4)
    assert store.steps() == kept
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [*(f"global_step_{step}" for step in kept), POINTER]


def test_after_resuming_an_earlier_step_later_checkpoints_are_removed_first(tmp_path: Path) -> None:
    save_all(CheckpointStore(tmp_path), 10, 20, 30)
    resumed = CheckpointStore(tmp_path, max_to_keep=3)
    save_all(resumed, 11)
    assert (resumed.steps(), resumed.latest()) == ([10, 11, 30], tmp_path / "global_step_11")
    save_all(resumed, 12)
    assert (resumed.steps(), resumed.latest()) == ([10, 11, 12], tmp_path / "global_step_12")


def test_a_repeated_step_replaces_its_checkpoint(store: CheckpointStore) -> None:
    save_all(store, 10, 20)
    save(store, 20, write_named("again"))
    latest = store.latest()
    assert latest is not None
    assert (store.steps(), read(latest)) == ([10, 20], "again")
    assert len(list(store.path.iterdir())) == 3


@pytest.mark.parametrize("text", ["7", "", "../elsewhere", "10 20"])
def test_a_pointer_to_a_missing_checkpoint_is_an_error_that_lists_the_steps(store: CheckpointStore, text: str) -> None:
    save_all(store, 10, 20)
    (store.path / POINTER).write_text(text)
    with pytest.raises(CheckpointError, match=r"does not exist \(complete steps: 10, 20\); write one of them"):
        store.latest()
    save_all(store, 30)
    assert store.latest() == store.path / "global_step_30"


def test_a_path_to_resume_from_names_an_existing_step(store: CheckpointStore) -> None:
    save_all(store, 10)
    assert resuming_from(store, 10).find() == store.path / "global_step_10"
    for name, reason in (("policy", "must end in global_step_N"), ("global_step_11", "does not exist")):
        with pytest.raises(CheckpointError, match=reason):
            CheckpointStore(store.path, -1, "from_path", str(store.path / name)).find()


@pytest.mark.parametrize(
    ("mode", "with_checkpoint", "without"),
    [
        ("latest", "resumes from step 10", "starts again, because there is no checkpoint"),
        (
            "none",
            "starts again, because trainer.resume_mode=none; with trainer.resume_mode=latest, it resumes from step 10",
            "starts again, because there is no checkpoint",
        ),
        (
            "from_path",
            "resumes from trainer.resume_path=other/global_step_5 again; with trainer.resume_mode=latest, it resumes "
            "from step 10",
            "resumes from trainer.resume_path=other/global_step_5 again",
        ),
    ],
)
def test_the_next_run_of_the_command_is_described_as_the_configuration_says(
    tmp_path: Path, mode: Literal["none", "latest", "from_path"], with_checkpoint: str, without: str
) -> None:
    store = CheckpointStore(tmp_path, -1, mode, "other/global_step_5" if mode == "from_path" else None)
    assert store.describe_rerun() == without
    save_all(store, 10)
    assert store.describe_rerun() == with_checkpoint


@pytest.mark.parametrize("is_of_the_disk", [True, False])
@pytest.mark.parametrize(
    ("earlier", "outlook"), [([10], "resumes from step 10"), ([], "starts again, because there is no checkpoint")]
)
def test_a_failed_save_leaves_no_files_and_says_what_remains(
    store: CheckpointStore, is_of_the_disk: bool, earlier: list[int], outlook: str
) -> None:
    save_all(store, *earlier)
    error = OSError(28, "No space left on device") if is_of_the_disk else RuntimeError("Connection closed by peer")

    def fail(folder: Path) -> None:
        (folder / FILES[0]).touch()
        raise error

    message = rf"step 20 in {store.path}: .*No space left on device\. Free disk space, .* {outlook}$"
    expected = (CheckpointError, message) if is_of_the_disk else (RuntimeError, "^Connection closed by peer$")
    with pytest.raises(expected[0], match=expected[1]):
        save(store, 20, fail)
    assert store.steps() == earlier
    assert [entry.name for entry in store.path.glob(".global_step_*")] == []


def verify(store: CheckpointStore, step: int) -> None:
    asyncio.run(store.verify(store.path / f"global_step_{step}"))


@pytest.mark.parametrize(
    ("file", "harm", "reason"),
    [
        (FILES[0], flip_a_bit, "the content of {file} has changed since it was saved"),
        (FILES[1], flip_a_bit, "the content of {file} has changed since it was saved"),
        (FILES[1], lambda path: path.write_bytes(b""), f"{{file}} has 0 bytes instead of {N_BYTES:,}"),
        (FILES[1], Path.unlink, "{file} is missing"),
        (FILES[1], lambda path: (path.unlink(), path.mkdir()), "cannot read {file} (Is a directory)"),
        (MANIFEST, Path.unlink, f"{MANIFEST} is missing, because the copy is incomplete or an older version wrote it"),
        (MANIFEST, flip_a_bit, f"{MANIFEST} is damaged"),
        (MANIFEST, lambda path: path.write_bytes(b""), f"{MANIFEST} is damaged"),
        (MANIFEST, lambda path: path.write_bytes(b"[]"), f"{MANIFEST} is damaged"),
    ],
)
def test_a_damaged_file_is_named_and_the_newest_complete_checkpoint_offered(
    store: CheckpointStore, file: str, harm: Callable[[Path], object], reason: str
) -> None:
    save_all(store, 10, 20, 30, 40)
    (store.path / "global_step_40" / "note.txt").write_text("a file of the user")
    verify(store, 40)
    harm(store.path / "global_step_40" / file)
    flip_a_bit(store.path / "global_step_30" / FILES[0])
    with pytest.raises(CheckpointError) as caught:
        verify(store, 40)
    folder, complete = store.path / "global_step_40", store.path / "global_step_20"
    assert str(caught.value) == (
        f"cannot resume from {folder}: {reason.format(file=folder / file)}. The latest intact checkpoint is "
        f"{complete}. Set trainer.resume_mode=from_path and trainer.resume_path={complete} to resume from it"
    )


def test_without_a_complete_checkpoint_a_new_start_is_offered(store: CheckpointStore) -> None:
    save_all(store, 10)
    (store.path / "global_step_10" / FILES[1]).unlink()
    with pytest.raises(CheckpointError, match=r"is missing\. No other checkpoint in .* Set trainer\.resume_mode=none"):
        verify(store, 10)


def test_a_checkpoint_resumed_by_path_is_kept_until_the_next_is_saved(store: CheckpointStore, disk: "Disk") -> None:
    """The pointer still names the damaged checkpoint, which cannot be resumed from."""
    save_all(store, 10, 20, 30)
    store = resuming_from(store, 20)
    assert store.find() == store.path / "global_step_20"
    disk.capacity = 0
    assert crash_during_save(store, 21) == [20, 30]
    save(store, 21, write_named("twenty-one"), expected_bytes=SIZE)
    save(store, 22, write_named("twenty-two"), expected_bytes=SIZE)
    assert store.steps() == [21, 22]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=1)
    save_all(store, 10)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "rmdir", busy)
        save_all(store, 20)
    assert "Saved the checkpoint at step 20, but failed to remove an old one" in caplog.text
    assert (store.steps(), store.latest()) == ([20], tmp_path / "global_step_20")
    save_all(store, 30)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["global_step_30", POINTER]


def busy(*_: object, **__: object) -> None:
    raise OSError(39, "Directory not empty")


class Disk:
    """A disk with `capacity` bytes for checkpoints and the spare bytes that are left free for everything else."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder = folder
        self.capacity = capacity + SPARE_BYTES

    def usage(self, path: Path) -> Usage:
        used = sum(file.stat().st_size for file in self.folder.rglob("global_step_*/**/*") if file.is_file())
        used += sum(file.stat().st_size for file in self.folder.rglob(".global_step_*/**/*") if file.is_file())
        return Usage(self.capacity, used, self.capacity - used)


@pytest.fixture
def disk(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(store.path, capacity=10 * SIZE)
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    return disk


@pytest.mark.parametrize(
    ("capacity", "kept"), [(4 * SIZE, [10, 20, 30]), (4 * SIZE - 1, [20, 30]), (3 * SIZE - 1, [30]), (0, [30])]
)
def test_on_a_small_disk_the_oldest_checkpoints_are_removed_first_and_never_the_last(
    store: CheckpointStore, disk: Disk, capacity: int, kept: list[int]
) -> None:
    save_all(store, 10, 20, 30)
    disk.capacity = capacity + SPARE_BYTES
    remaining: list[int] = []

    def write(folder: Path) -> None:
        remaining.extend(store.steps())
        write_named("forty")(folder)

    save(store, 40, write, expected_bytes=SIZE)
    assert remaining == kept
    assert store.steps() == [*kept, 40]


@pytest.mark.parametrize(("missing", "kept"), [(0, [10, 11, 20, 30]), (1, [10, 11, 30]), (2, [10, 11]), (3, [11])])
def test_on_a_small_disk_the_checkpoint_to_resume_from_is_never_removed(
    store: CheckpointStore, disk: Disk, missing: int, kept: list[int]
) -> None:
    """After resuming from step 10, step 30 is the highest, but a crash must resume from step 11."""
    save_all(store, 10, 20, 30, 11)
    disk.capacity = (5 - missing) * SIZE + SPARE_BYTES
    assert crash_during_save(store, 12) == kept
    assert store.latest() == store.path / "global_step_11"


def test_no_checkpoint_is_removed_while_the_pointer_names_a_missing_one(store: CheckpointStore, disk: Disk) -> None:
    """The user must choose one of the remaining checkpoints."""
    save_all(store, 10, 20, 30)
    (store.path / POINTER).write_text("25")
    disk.capacity = 3 * SIZE + SPARE_BYTES
    with pytest.raises(CheckpointError, match=f"has {SPARE_BYTES:,} bytes free"):
        store.check_space(SIZE)
    assert crash_during_save(store, 26) == [10, 20, 30]


def test_a_first_run_needs_space_for_two_checkpoints(store: CheckpointStore, disk: Disk) -> None:
    disk.capacity = 2 * SIZE + SPARE_BYTES
    store.check_space(SIZE)
    disk.capacity -= 1
    needed = f"{2 * SIZE + SPARE_BYTES:,}"
    with pytest.raises(CheckpointError, match=f"has {disk.capacity:,} bytes free .* needs {needed}: .* {SIZE:,}, the"):
        store.check_space(SIZE)


def test_removable_checkpoints_count_as_free_space(store: CheckpointStore, disk: Disk) -> None:
    save_all(store, 10, 20, 30)
    disk.capacity = 3 * SIZE + SPARE_BYTES
    store.check_space(SIZE)
    store.check_space(2 * SIZE)
    assert store.steps() == [10, 20, 30]
    with pytest.raises(CheckpointError, match=f"has {2 * SIZE + SPARE_BYTES:,} bytes free"):
        store.check_space(2 * SIZE + 1)


def test_leftovers_of_a_crash_count_as_free_space(store: CheckpointStore, disk: Disk) -> None:
    save_all(store, 10)
    disk.capacity = 2 * SIZE + SPARE_BYTES
    (store.path / ".global_step_20.partial").mkdir()
    write_named("twenty")(store.path / ".global_step_20.partial")
    store.check_space(SIZE)
    assert store.steps() == [10]


def test_retention_keeps_a_checkpoint_resumed_by_path_until_the_next_save(tmp_path: Path) -> None:
    """With remote storage, retention runs after every step, also before the first save."""
    save_all(CheckpointStore(tmp_path), 10, 20, 30)
    store = CheckpointStore(tmp_path, 1, "from_path", str(tmp_path / "global_step_20"))
    assert store.find() == tmp_path / "global_step_20"
    store.remove_superseded()
    assert store.steps() == [20, 30]
    save_all(store, 21)
    store.remove_superseded()
    assert store.steps() == [21]
