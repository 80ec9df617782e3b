"""Files are written in the background: slow and full disks delay or fail only what needs them."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
from tx_kit.engines import Desk

from tx.tinker.backends.base import Save
from tx.tinker.db_models import RequestStatus


@pytest.fixture
def disk(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """A slow disk, which writes when the event is set."""
    is_ready = Event()
    capture = desk.backend.capture

    def capture_slowly(model_id: str, *, with_optimizer: bool) -> Save:
        save = capture(model_id, with_optimizer=with_optimizer)
        return lambda folder: (is_ready.wait(60), save(folder))[1]

    monkeypatch.setattr(desk.backend, "capture", capture_slowly)
    yield is_ready
    is_ready.set()


def fail_writes(desk: Desk, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let all writes of models fail."""

    def save(folder: Path) -> None:
        raise error

    monkeypatch.setattr(desk.backend, "capture", lambda model_id, *, with_optimizer: save)


def test_saves_delay_only_their_own_model(desk: Desk, disk: Event) -> None:
    model, twin = desk.models()
    for one in (model, twin):
        desk.train(one)
    save, waiting = desk.save(model), desk.step(model)
    desk.work_until_done(desk.train(twin), desk.sample())
    assert [desk.row(one).status for one in (save, waiting)] == [RequestStatus.PENDING] * 2
    disk.set()
    desk.work()
    assert desk.result(save)
    assert desk.result(waiting)
    desk.load(f"tinker://{model}/weights/x", model_seq_id=2)
    desk.step("s:train:2")
    assert desk.current_loss("s:train:2") == desk.current_loss(model)


def test_a_restore_point_is_written_while_its_model_trains(desk: Desk, disk: Event) -> None:
    """It holds the state of its step, not of later ones."""
    model = desk.model()
    step = desk.train(model)
    desk.work_until_done(step)
    desk.begin_points()
    desk.train(model, [7, 8])
    later = desk.score(model)
    desk.work_until_done(later)
    assert desk.model_row(model).restored_until == 0
    disk.set()
    desk.engine._points.wait()
    assert desk.model_row(model).restored_until == step
    desk.restart()
    restored = desk.score(model)
    desk.work()
    assert desk.loss(restored) == desk.loss(later)


def test_writes_of_a_killed_engine_are_repeated(desk: Desk, disk: Event) -> None:
    """It dies while it writes a checkpoint of one model, and a restore point of another."""
    saved, stepped = desk.models()
    for one in (saved, stepped):
        desk.work_until_done(desk.train(one))
    save = desk.save(saved)
    desk.fetch()
    desk.engine.work()
    desk.begin_points()
    assert desk.engine._saves
    assert desk.engine._points.is_writing(stepped)
    dead, desk.engine = desk.engine, None
    desk.restart()
    desk.work()
    assert desk.result(save)
    desk.load(f"tinker://{saved}/weights/x", model_seq_id=2)
    assert desk.probe(saved) == desk.probe(stepped) == desk.probe("s:train:2")
    disk.set()
    dead.close()


def test_a_full_disk_fails_single_requests(
    desk: Desk, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = desk.step(model)
    desk.work()
    fail_writes(desk, monkeypatch, OSError(28, "No space left on device"))
    desk.write_points()
    assert "the restore point of model s:train:0" in caplog.text
    save = desk.save(model)
    desk.work()
    assert desk.row(step).status is RequestStatus.DONE
    assert "No space left" in desk.error(save)[1]
    assert not [path for path in desk.config.checkpoints_base.rglob("*") if path.name.startswith(".unfinished")]


def test_a_failed_restore_point_is_not_retried_after_every_step(
    desk: Desk, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_writes(desk, monkeypatch, RuntimeError("the device is out of memory"))
    desk.engine._points._written[model] = -1e9, 0.0
    for _ in range(3):
        step = desk.step(model)
        desk.work()
        assert desk.result(step)
    assert caplog.text.count("failed to write the restore point of model s:train:0") == 1
    assert caplog.text.count("RuntimeError: the device is out of memory") == 1


def test_writes_that_would_fill_the_disk_are_refused(
    new_desk: Callable[..., Desk], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = new_desk(min_free_bytes=1 << 60)
    model = desk.model()
    step = desk.step(model)
    saves = [desk.save(model), desk.save_for_sampler(model, sampling_session_seq_id=1)]
    desk.work()
    desk.write_points()
    refusal = r"GiB free, and 0\.0 GiB are to be written; 1073741824\.0 GiB must stay free \(--min-free-bytes\)"
    assert re.search(f"failed to write the restore point of model s:train:0: .* {refusal}", caplog.text)
    assert desk.result(step)
    for one in saves:
        category, message = desk.error(one)
        assert re.search(f"the disk of {tmp_path} has .* {refusal}. Delete checkpoints", message)
        assert category == "server"
    assert not list(tmp_path.rglob("*.safetensors"))


def test_waiting_writes_count_when_space_is_checked(desk: Desk, disk: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two saves wait for the disk, which has space for one."""
    models = desk.models()
    desk.work()
    n_bytes = desk.backend.n_bytes(models[0], with_optimizer=True)

    def usage(folder: Path) -> SimpleNamespace:
        written = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        return SimpleNamespace(free=desk.config.min_free_bytes + 1.5 * n_bytes - written)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    saves = [desk.save(one) for one in models]
    desk.fetch()
    while len(desk.engine._saves) < 2:
        desk.engine.work()
    disk.set()
    desk.work()
    assert [desk.row(one).status for one in saves] == [RequestStatus.DONE, RequestStatus.FAILED]
    assert "must stay free (--min-free-bytes)" in desk.error(saves[1])[1]
