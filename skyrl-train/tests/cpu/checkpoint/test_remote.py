"""Remote storage without a server: local files and memory behind fsspec. `tests/s3` has the same with S3."""

import json
import os
import random
import shutil
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from train_kit.checkpoints import read, save, write_named
from xxhash import xxh3_128_hexdigest

from skyrl_report.remote import Fingerprint, RemoteFolder
from skyrl_train.checkpoint import CheckpointStore, RemoteCheckpoints, find_credentials_fault, upload_files
from skyrl_train.checkpoint.manifest import MANIFEST, find_damage, fingerprint
from skyrl_train.checkpoint.store import POINTER
from skyrl_train.errors import CheckpointError
from skyrl_train.remote_storage import Upload, Uploader, upload_evaluation


@pytest.fixture(params=["file", "memory"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteCheckpoints:
    """An empty folder in remote storage."""
    url = f"file://{tmp_path}/remote/run" if request.param == "file" else f"memory://{uuid4()}/run"
    return RemoteCheckpoints(RemoteFolder(url))


def download(remote: RemoteCheckpoints, step: int, folder: Path) -> Path:
    folder.mkdir()
    remote.download(step, folder)
    return folder


def test_a_downloaded_checkpoint_equals_the_uploaded_one(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    assert (remote.steps(), remote.latest_step()) == ([], None)
    path = save(CheckpointStore(tmp_path / "local"), 10, write_named("ten"))
    assert remote.upload(path) == 2000
    assert (remote.steps(), remote.latest_step()) == ([10], 10)
    assert read(download(remote, 10, tmp_path / "copy")) == "ten"
    assert remote.upload(path) == 0, "an uploaded checkpoint is not sent again"


@pytest.mark.parametrize("failing", ["", "/files", "/files/inner"])
def test_a_folder_that_cannot_be_listed_is_an_error_not_an_empty_folder(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RemoteFolder(f"file://{tmp_path}")
    (tmp_path / "files/inner").mkdir(parents=True)
    (tmp_path / "files/inner/a").write_text("123")
    (tmp_path / "b").write_text("1")
    assert folder.sizes() == {"files/inner/a": 3, "b": 1}
    system, _ = folder._opened
    list_folder = system.ls

    def ls(path: str, **options: Any) -> Any:
        if path.rstrip("/") == f"{tmp_path}{failing}":
            raise OSError("connection reset")
        return list_folder(path, **options)

    monkeypatch.setattr(system, "ls", ls)
    monkeypatch.setattr("skyrl_report.remote.time.sleep", lambda _: None)
    with pytest.raises(OSError, match="connection reset"):
        folder.sizes()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.dictionaries(st.sampled_from(["a", "b/c", "b/d e", "ü.pt"]), st.binary(max_size=3000), min_size=1))
def test_any_files_survive_a_round_trip(files: dict[str, bytes], tmp_path: Path) -> None:
    root = tmp_path / uuid4().hex

    def write(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    remote = RemoteCheckpoints(RemoteFolder(f"memory://{uuid4()}/run"))
    remote.upload(save(CheckpointStore(root / "local"), 3, write))
    copy = download(remote, 3, root / "copy")
    assert find_damage(copy) == []
    assert {name: (copy / name).read_bytes() for name in files} == files


def test_a_changed_byte_in_any_file_is_named(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "local")
    remote.upload(save(store, 5, write_named("five")))
    remote.upload(save(store, 10, write_named("ten")))
    folder = remote.folder / "global_step_10"
    for name in ("driver.pt", "policy/schedule.pt", MANIFEST):
        content = folder.read(name)
        assert content is not None
        position = random.randrange(len(content))
        folder.write(name, content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(CheckpointError, match=rf"{name}.*The latest intact checkpoint is .*global_step_5"):
            download(remote, 10, tmp_path / f"copy-{name.replace('/', '-')}")
        folder.write(name, content)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside"])
def test_a_manifest_that_names_files_outside_of_its_folder_is_refused(
    remote: RemoteCheckpoints, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "made/global_step_10"
    folder.mkdir(parents=True)
    (folder.parent / "outside").write_text("x")
    files = {name: fingerprint(folder.parent / "outside")._asdict()}
    manifest = {"files": files, "xxh3_128": xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())}
    (remote.folder / "global_step_10").write(MANIFEST, json.dumps(manifest).encode())
    with pytest.raises(CheckpointError, match=r"checksums.json is damaged"):
        download(remote, 10, tmp_path / "copy")


def test_incomplete_and_abandoned_checkpoints_are_not_the_latest(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "local")
    for step in (10, 20, 30):
        remote.upload(save(store, step, write_named(str(step))))
    assert remote.latest_step() == 30
    (remote.folder / "global_step_30").remove(MANIFEST)
    assert remote.latest_step() == 20, "step 30 lacks its marker"
    (remote.folder / "global_step_20").write("driver.pt", b"half")
    assert remote.latest_step() == 10, "step 20 lacks half a file"
    remote.upload(store.path / "global_step_30")
    remote.point_to(10)
    assert remote.latest_step() == 10, "step 30 is from before the run resumed from step 10"
    remote.upload(save(store, 20, write_named("another twenty")))
    remote.point_to(20)
    assert remote.latest_step() == 20
    assert read(download(remote, 20, tmp_path / "copy")) == "another twenty"


def test_a_local_file_that_changed_since_it_was_saved_is_not_uploaded(
    remote: RemoteCheckpoints, tmp_path: Path
) -> None:
    path = save(CheckpointStore(tmp_path / "local"), 10, write_named("ten"))
    content = (path / "driver.pt").read_bytes()
    (path / "driver.pt").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(CheckpointError, match=r"driver.pt has changed since it was saved, so it is not uploaded"):
        remote.upload(path)
    assert remote.latest_step() is None


def test_evaluations_are_uploaded_once(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals/catch.jsonl").write_text('{"a": 1}\n')
    assert upload_files(tmp_path / "evals", remote.folder) == 9
    assert upload_files(tmp_path / "evals", remote.folder) == 0
    assert remote.folder.read("catch.jsonl") == b'{"a": 1}\n'


def test_images_of_evaluations_are_uploaded_beside_them(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    """An image that another evaluation is writing is left to that evaluation."""
    images = tmp_path / "evals/images"
    for step in (0, 5):
        (tmp_path / f"evals/global_step_{step}").mkdir(parents=True)
        (tmp_path / f"evals/global_step_{step}/catch.jsonl").write_text("{}\n")
    assert upload_evaluation(tmp_path / "evals/global_step_0", remote.folder) == 3
    images.mkdir()
    (images / "a.png").write_bytes(b"image")
    (images / "b.png.partial").write_bytes(b"im")
    assert upload_evaluation(tmp_path / "evals/global_step_5", remote.folder) == 8
    assert upload_evaluation(tmp_path / "evals/global_step_5", remote.folder) == 0
    assert remote.folder.names() == ["global_step_0", "global_step_5", "images"]
    assert (remote.folder / "images").names() == ["a.png"]


def test_a_failed_upload_is_retried_until_it_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_train.remote_storage.MAX_BACKOFF_S", 0.01)
    n_attempts = 0

    def send() -> int:
        nonlocal n_attempts
        n_attempts += 1
        if n_attempts < 4:
            raise OSError("the network is down")
        return 7

    uploader = Uploader()
    uploader.submit(Upload(tmp_path, 1, send))
    assert uploader.wait(10)
    assert [(result.error, result.n_bytes) for result in uploader.take_results()] == [
        *[("OSError: the network is down", 0)] * 3,
        (None, 7),
    ]
    uploader.close()


def test_the_upload_of_a_removed_folder_is_not_retried(tmp_path: Path) -> None:
    uploader = Uploader()
    uploader.submit(Upload(tmp_path / "removed", 1, lambda: len((tmp_path / "removed").read_bytes())))
    assert uploader.wait(10)
    (result,) = uploader.take_results()
    assert (result.is_final, result.error) == (True, "it was removed from this machine before it was uploaded")
    uploader.close()


def test_the_newest_checkpoint_is_uploaded_first_and_a_hanging_upload_does_not_outlast_the_wait(tmp_path: Path) -> None:
    started, finish, order = threading.Event(), threading.Event(), list[int]()

    def send(step: int) -> int:
        order.append(step)
        started.set()
        finish.wait(20)
        return 0

    uploader = Uploader()
    uploader.submit(Upload(tmp_path / "5", 5, lambda: send(5)))
    assert started.wait(10)
    for step in (10, 30, 20):
        uploader.submit(Upload(tmp_path / str(step), step, lambda step=step: send(step)))
    before = time.monotonic()
    assert not uploader.wait(0.2)
    assert time.monotonic() - before < 5
    finish.set()
    assert uploader.wait(10)
    assert order == [5, 30, 20, 10]
    uploader.close()


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        ({}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set"),
        ({"AWS_ACCESS_KEY_ID": "a"}, "AWS_SECRET_ACCESS_KEY is not set"),
        ({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, None),
        ({"AWS_PROFILE": "work"}, None),
    ],
)
def test_missing_credentials_are_named(environ: dict[str, str], fault: str | None, tmp_path: Path) -> None:
    found = find_credentials_fault("s3://bucket", environ | {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")})
    assert found is None if fault is None else str(found).startswith(fault)
    assert find_credentials_fault("memory://bucket", {}) is None


def test_a_pinned_checkpoint_is_kept_until_it_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    store = CheckpointStore(tmp_path, max_to_keep=1)
    store.pinned |= {1, 2}
    for step in (1, 2, 3):
        save(store, step, write_named(str(step)))
    assert store.steps() == [1, 2, 3]
    store.pinned.discard(1)
    store.remove_superseded()
    assert store.steps() == [2, 3]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    save(store, 4, write_named("4"), expected_bytes=1)
    assert store.steps() == [4], "a full disk removes pinned checkpoints, too, but never the one to resume from"
    assert (tmp_path / POINTER).read_text() == "4\n"


@pytest.mark.parametrize("n_sent", [0, 1])
def test_a_replacement_that_is_interrupted_leaves_no_mixture(
    remote: RemoteCheckpoints, tmp_path: Path, n_sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of both checkpoints have equal sizes, which alone decide whether one is complete."""
    store = CheckpointStore(tmp_path / "local")
    for step in (10, 20):
        remote.upload(save(store, step, write_named(f"step {step}")))
    path = save(store, 20, write_named("again20"))
    upload_file, n_calls = RemoteFolder.upload_file, count()

    def upload_then_crash(folder: RemoteFolder, local: Path, name: str) -> Fingerprint:
        if next(n_calls) == n_sent:
            raise KeyboardInterrupt
        return upload_file(folder, local, name)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "upload_file", upload_then_crash)
        with pytest.raises(KeyboardInterrupt):
            remote.upload(path)
    assert remote.latest_step() == 10
    assert remote.upload(path) == 2000
    assert remote.latest_step() == 20
    assert read(download(remote, 20, tmp_path / "copy")) == "again20"
