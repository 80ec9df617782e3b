"""After a restart, a model is bitwise the same, whatever happened before."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from tx_kit.engines import SETTINGS, Desk, new_backend

from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.backends.jax.config import JaxConfig
from tx.tinker.db_models import Model, ModelStatus, RequestStatus, Session, SessionStatus
from tx.tinker.engine import loop, restore
from tx.tinker.refusal import Refusal
from tx.tinker.store import queries
from tx.tinker.submission.training import load_weights, save_weights, unload_model
from tx.tinker.types import Pass, PassResult
from tx.tinker.wire import requests as wire


def die_and_come_back(desk: Desk, tiny_model: Path) -> None:
    """Start another engine, as after `kill -9`: the first one writes nothing more."""
    desk.start(new_backend(tiny_model))
    desk.engine._points.restore()


def learn(desk: Desk, model: str, *tokens: int) -> None:
    desk.train(model, [1, 2, *tokens])
    desk.step(model)


def write_point(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> int:
    with monkeypatch.context() as patch:
        patch.setattr(loop, "POINT_DELAY_SECONDS", 0.0)
        desk.engine._write_points()
        desk.engine._points.wait()
    return desk.change(lambda db: db.get_one(Model, "s:train:0").restored_until)


def probe(desk: Desk, model: str) -> float:
    """Return a number that depends on every weight and, through a step, on the optimizer."""
    desk.train(model, [3, 4, 5])
    desk.step(model)
    request_id = desk.train(model, [7, 8, 9], is_forward_only=True)
    desk.work()
    return desk.loss(request_id)


@pytest.mark.parametrize("is_written", [False, True])
def test_a_restored_model_is_the_same(
    desk: Desk, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    session = desk.session()
    model, twin = desk.model(session, 0), desk.model(session, 1)
    for name in (model, twin):
        learn(desk, name, 5)
    desk.work()
    if is_written:
        assert write_point(desk, monkeypatch) > 0
    for name in (model, twin):
        learn(desk, name, 6)
        desk.train(name, [9, 9])  # gradients without a step
    desk.work()
    expected = probe(desk, twin)
    die_and_come_back(desk, tiny_model)
    assert probe(desk, model) == expected


def test_a_step_with_an_infinite_gradient_is_not_repeated(desk: Desk, tiny_model: Path) -> None:
    session = desk.session()
    model, twin = desk.model(session, 0), desk.model(session, 1)
    for name in (model, twin):
        learn(desk, name, 5)
    desk.train(model, weight=3e38)
    failed = desk.step(model)
    desk.work()
    assert desk.row(failed).status is RequestStatus.FAILED
    die_and_come_back(desk, tiny_model)
    assert probe(desk, model) == probe(desk, twin)


def test_unfinished_requests_are_not_repeated(desk: Desk, tiny_model: Path) -> None:
    session = desk.session()
    model, twin = desk.model(session, 0), desk.model(session, 1)
    for name in (model, twin):
        learn(desk, name, 5)
    cancelled = desk.train(model, [6, 6])
    desk.work()

    def undo(db: object) -> None:
        db.get_one(type(desk.row(cancelled)), cancelled).status = RequestStatus.CANCELLED  # type: ignore[attr-defined]

    desk.change(undo)
    die_and_come_back(desk, tiny_model)
    assert probe(desk, model) == probe(desk, twin)


def test_loaded_models(desk: Desk, tiny_model: Path) -> None:
    """The checkpoint may be gone."""
    session = desk.session()
    model = desk.model(session)
    learn(desk, model, 5)
    desk.submit(lambda to: save_weights(to, wire.SaveWeightsRequest(model_id=model, path="x")))
    desk.work()
    for number in (1, 2):
        body = wire.LoadWeightsRequest(
            path=f"tinker://{model}/weights/x", optimizer=True, session_id=session, model_seq_id=number
        )
        desk.submit(lambda to, body=body: load_weights(to, body))  # type: ignore[misc]
    desk.work()
    shutil.rmtree(desk.config.checkpoints_base / "s_train_0")
    expected = probe(desk, "s:train:1")
    die_and_come_back(desk, tiny_model)
    assert probe(desk, "s:train:2") == expected


def test_deleted_models_stay_deleted(desk: Desk, tiny_model: Path) -> None:
    session = desk.session()
    models = [desk.model(session, number) for number in range(2)]
    desk.work()
    desk.submit(lambda to: unload_model(to, wire.ModelRequest(model_id=models[0])))
    desk.work()
    die_and_come_back(desk, tiny_model)
    assert list(desk.backend.models()) == models[1:]


def test_models_are_restored_when_their_base_model_is_served(desk: Desk, tmp_path: Path, tiny_model: Path) -> None:
    session = desk.session()
    model, twin = desk.model(session, 0), desk.model(session, 1)
    for name in (model, twin):
        learn(desk, name, 5)
    desk.work()
    expected = probe(desk, twin)
    waiting, sample = desk.train(model, [3, 4, 5]), desk.sample()
    other = Desk(tmp_path, JaxBackend(tiny_model, "org/other", JaxConfig(**SETTINGS)), base_model="org/other")
    assert other.change(lambda db: queries.engine_state(db, "org/other")) is None
    other.engine.run(lambda: other.row(sample).status is not RequestStatus.PENDING)
    assert dict(other.backend.models()) == {}
    assert "the weights belong to base model org/tiny, and this server has org/other" in (other.row(sample).error or "")
    assert other.row(waiting).status is RequestStatus.PENDING
    assert other.change(lambda db: [queries.n_models(db, name) for name in ("org/tiny", "org/other")]) == [2, 0]
    other.close()
    die_and_come_back(desk, tiny_model)
    desk.step(model)
    request_id = desk.train(model, [7, 8, 9], is_forward_only=True)
    desk.work()
    assert desk.loss(request_id) == expected


def test_a_lost_model_waits_for_the_next_engine(
    desk: Desk, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = desk.session()
    lost, other, twin = (desk.model(session, number) for number in range(3))
    for name in (lost, other, twin):
        learn(desk, name, 5)
    desk.work()
    write_point(desk, monkeypatch)
    expected = probe(desk, twin)
    waiting = desk.train(lost, [3, 4, 5])

    def full(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(JaxBackend, "load_model", full)
        patch.setattr(JaxBackend, "create_model", full)
        die_and_come_back(desk, tiny_model)
    assert list(desk.backend.models()) == []
    assert "model s:train:0 cannot be restored" in caplog.text
    new = desk.model(session, 3)
    desk.engine.serve(lambda: desk.row(waiting + 1).status is not RequestStatus.PENDING)
    assert list(desk.backend.models()) == [new]
    assert desk.row(waiting).status is RequestStatus.PENDING
    with pytest.raises(Refusal, match=r"s:train:0 could not be restored .* MemoryError: no room; restart the server"):
        desk.step(lost)
    die_and_come_back(desk, tiny_model)
    assert set(desk.backend.models()) == {lost, other, twin, new}
    desk.step(lost)
    request_id = desk.train(lost, [7, 8, 9], is_forward_only=True)
    desk.work()
    assert desk.loss(request_id) == expected


def test_a_partially_restored_model_takes_no_memory(
    desk: Desk, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = desk.model(desk.session())
    learn(desk, model, 5)
    desk.work()

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(JaxBackend, "optim_step", fail)
        die_and_come_back(desk, tiny_model)
    assert dict(desk.backend.models()) == {}
    assert desk.change(lambda db: db.get_one(Model, model).lost_because) == "MemoryError: no room"


def test_passes_without_gradients_are_not_repeated(
    desk: Desk, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = desk.model(desk.session())
    for is_forward_only in (True, False, True):
        desk.train(model, is_forward_only=is_forward_only)
    desk.work()
    done: list[bool] = []
    compute = JaxBackend.compute

    def record(backend: JaxBackend, pass_: Pass) -> Iterator[PassResult]:
        done.append(pass_.is_forward_only)
        return compute(backend, pass_)

    monkeypatch.setattr(JaxBackend, "compute", record)
    die_and_come_back(desk, tiny_model)
    assert done == [False]


def test_an_earlier_point_is_deleted_after_the_new_one_is_durable(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    if desk.database.dialect.name != "sqlite":
        pytest.skip("every commit to PostgreSQL is durable")
    model = desk.model(desk.session())
    learn(desk, model, 5)
    desk.work()
    first = write_point(desk, monkeypatch)
    learn(desk, model, 6)
    desk.work()
    events: list[str] = []
    rmtree = shutil.rmtree

    def record_statement(_: object, __: object, statement: str, *___: object) -> None:
        if statement.startswith("PRAGMA synchronous="):
            events.append(statement.rpartition("=")[2])

    def record_rmtree(folder: Path, **options: Any) -> None:
        events.append(f"delete {folder.name}")
        rmtree(folder, **options)

    event.listen(desk.database, "before_cursor_execute", record_statement)
    event.listen(desk.database, "commit", lambda _: events.append("commit"))
    monkeypatch.setattr(shutil, "rmtree", record_rmtree)
    write_point(desk, monkeypatch)
    deleted = events.index(f"delete {first}")
    assert events[deleted - 2 : deleted] == ["FULL", "commit"]


def with_spoilt_point(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A model that cannot be restored, and the folder of its restore point."""
    model = desk.model(desk.session())
    learn(desk, model, 5)
    desk.work()
    point = write_point(desk, monkeypatch)
    folder = desk.config.checkpoints_base / "restore" / model.replace(":", "_")
    (folder / str(point) / "training.json").unlink()
    return model, folder


def end_session(desk: Desk) -> None:
    desk.change(lambda db: queries.end_session(db, db.get_one(Session, "s"), SessionStatus.FINISHED, ""))


def test_a_lost_model_whose_session_has_ended_is_given_up(
    desk: Desk, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = with_spoilt_point(desk, monkeypatch)
    wanted = [
        desk.train(model),
        desk.submit(lambda to: save_weights(to, wire.SaveWeightsRequest(model_id=model, path="x"))),
    ]
    die_and_come_back(desk, tiny_model)
    end_session(desk)
    desk.engine._queue.fetch()
    assert not desk.engine.work()
    assert folder.exists()
    die_and_come_back(desk, tiny_model)
    for one in wanted:
        assert f"model {model} could not be restored: FileNotFoundError" in (desk.row(one).error or "")
        assert desk.row(one).error_category == "server"
    desk.work()
    assert desk.change(lambda db: db.get_one(Model, model).status) is ModelStatus.UNLOADED
    assert not folder.exists()


def test_a_lost_model_without_pending_saves_is_unloaded_at_once(
    desk: Desk, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = with_spoilt_point(desk, monkeypatch)
    die_and_come_back(desk, tiny_model)
    end_session(desk)
    die_and_come_back(desk, tiny_model)
    desk.work()
    assert desk.change(lambda db: db.get_one(Model, model).status) is ModelStatus.UNLOADED
    assert not folder.exists()


def test_a_lost_model_can_be_unloaded(desk: Desk, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = with_spoilt_point(desk, monkeypatch)
    waiting = desk.train(model)
    die_and_come_back(desk, tiny_model)
    unload = desk.submit(lambda to: unload_model(to, wire.ModelRequest(model_id=model)))
    assert desk.change(lambda db: queries.n_models(db, "org/tiny")) == 0
    desk.work()
    assert desk.result(unload)
    assert "could not be restored" in (desk.row(waiting).error or "")
    assert not folder.exists()


def test_a_model_that_only_waits_to_be_unloaded_is_not_restored(desk: Desk, tiny_model: Path) -> None:
    model = desk.model(desk.session())
    learn(desk, model, 5)
    desk.work()
    unload = desk.submit(lambda to: unload_model(to, wire.ModelRequest(model_id=model)))
    die_and_come_back(desk, tiny_model)
    assert dict(desk.backend.models()) == {}
    desk.work()
    assert desk.result(unload)


def test_a_model_that_is_unloaded_during_its_restore(
    desk: Desk, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its restore fails, too."""
    model = desk.model(desk.session())
    learn(desk, model, 5)
    desk.work()
    unloads = []

    def unload(*_: object) -> None:
        unloads.append(desk.submit(lambda to: unload_model(to, wire.ModelRequest(model_id=model))))
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(JaxBackend, "create_model", unload)
        die_and_come_back(desk, tiny_model)
    desk.engine._queue.fetch()
    desk.engine.work()
    assert desk.result(unloads[0])


def test_points_of_deleted_models_are_deleted(desk: Desk, tiny_model: Path) -> None:
    model = desk.model(desk.session())
    desk.work()
    desk.submit(lambda to: unload_model(to, wire.ModelRequest(model_id=model)))
    desk.work()
    left = desk.config.checkpoints_base / "restore" / "s_train_0" / "7"
    left.mkdir(parents=True)
    die_and_come_back(desk, tiny_model)
    assert not left.parent.exists()


def test_points_are_replaced_and_deleted(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    model = desk.model(desk.session())
    folder = desk.config.checkpoints_base / "restore" / "s_train_0"
    for _ in range(2):
        learn(desk, model, 5)
        desk.work()
        last = write_point(desk, monkeypatch)
        assert [path.name for path in folder.iterdir()] == [str(last)]
    desk.submit(lambda to: unload_model(to, wire.ModelRequest(model_id=model)))
    desk.work()
    assert not folder.exists()


def test_points_are_written_between_steps(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "POINT_INTERVAL_SEC", -1.0)
    model = desk.model(desk.session())
    learn(desk, model, 5)
    last_step = desk.step(model)
    desk.work()
    assert desk.change(lambda db: db.get_one(Model, model).restored_until) == last_step
