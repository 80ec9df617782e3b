"""After a restart, a model is bitwise the same, whatever happened before."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from tx_kit.engines import Desk

from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.db_models import ClientSession, ModelStatus, RequestStatus, SessionStatus
from tx.tinker.engine import restore
from tx.tinker.refusal import RefusalError
from tx.tinker.store import queries
from tx.tinker.types import Pass, PassResult


@pytest.fixture
def pair(desk: Desk) -> list[str]:
    """Two equal models."""
    models = desk.models()
    for one in models:
        desk.train(one, [1, 2, 5])
    desk.work()
    return models


def write_point(desk: Desk, model: str) -> int:
    """Write a restore point; return the last request that it includes."""
    desk.write_points()
    return desk.model_row(model).restored_until


def point_folder(desk: Desk, model: str) -> Path:
    return desk.config.checkpoints_base / "restore" / model.replace(":", "_")


def out_of_memory(*_: object, **__: object) -> None:
    raise MemoryError("no room")


# -- restored models


@pytest.mark.parametrize("is_written", [False, True])
def test_a_restored_model_is_the_same(desk: Desk, pair: list[str], is_written: bool) -> None:
    model, twin = pair
    if is_written:
        assert write_point(desk, model) > 0
    for name in pair:
        desk.train(name, [1, 2, 6])
        desk.run_pass(name, [9, 9])  # gradients without a step
    desk.work()
    expected = desk.probe(twin)
    desk.restart()
    assert desk.probe(model) == expected


def test_a_step_with_an_infinite_gradient_is_not_repeated(desk: Desk, pair: list[str]) -> None:
    model, twin = pair
    desk.run_pass(model, weight=3e38)
    failed = desk.step(model)
    desk.work()
    category, message = desk.error(failed)
    assert category == "user"
    assert re.match(r"the step was not applied, because the norm of the gradients is (inf|nan)\. ", message)
    desk.restart()
    assert desk.probe(model) == desk.probe(twin)


def test_passes_without_gradients_are_not_repeated(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    model = desk.model()
    for is_forward_only in (True, False, True):
        desk.run_pass(model, is_forward_only=is_forward_only)
    desk.work()
    repeated: list[bool] = []
    compute = JaxBackend.compute

    def record(backend: JaxBackend, pass_: Pass) -> Iterator[PassResult | None]:
        repeated.append(pass_.is_forward_only)
        return compute(backend, pass_)

    monkeypatch.setattr(JaxBackend, "compute", record)
    desk.restart()
    assert repeated == [False]


def test_loaded_models_are_restored_without_their_checkpoint(desk: Desk, model: str) -> None:
    desk.save(model)
    desk.work()
    for number in (1, 2):
        desk.load(f"tinker://{model}/weights/x", model_seq_id=number)
    desk.work()
    shutil.rmtree(desk.config.checkpoints_base / "s_train_0")
    expected = desk.probe("s:train:1")
    desk.restart()
    assert desk.probe("s:train:2") == expected


def test_unloaded_models_are_not_restored(desk: Desk) -> None:
    """Nor one that only waits to be unloaded."""
    models = desk.models(3)
    desk.work()
    desk.unload(models[0])
    desk.work()
    left = point_folder(desk, models[0]) / "7"
    left.mkdir(parents=True)
    unload = desk.unload(models[1])
    desk.restart()
    assert list(desk.backend.models()) == models[2:]
    assert not left.parent.exists()
    desk.work()
    assert desk.result(unload)


def test_models_are_restored_when_their_base_model_is_served(
    desk: Desk, pair: list[str], new_desk: Callable[..., Desk]
) -> None:
    model, twin = pair
    expected = desk.probe(twin)
    waiting, sample = desk.run_pass(model, [3, 4, 5]), desk.sample()
    other = new_desk(name="org/other")
    assert other.change(lambda db: queries.engine_state(db, "org/other")) is None
    other.engine.run(lambda: other.row(sample).status is not RequestStatus.PENDING)
    assert dict(other.backend.models()) == {}
    assert "the weights belong to base model org/tiny, but this server has org/other" in other.error(sample)[1]
    assert other.row(waiting).status is RequestStatus.PENDING
    assert other.change(lambda db: [queries.n_models(db, name) for name in ("org/tiny", "org/other")]) == [2, 0]
    desk.restart()
    desk.step(model)
    assert desk.current_loss(model) == expected


# -- lost models: those that could not be restored


def test_a_lost_model_waits_for_the_next_engine(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost, other, twin = desk.models(3)
    for name in (lost, other, twin):
        desk.train(name, [1, 2, 5])
    desk.work()
    write_point(desk, lost)
    expected = desk.probe(twin)
    waiting = desk.run_pass(lost, [3, 4, 5])
    with monkeypatch.context() as patch:
        patch.setattr(JaxBackend, "load_model", out_of_memory)
        patch.setattr(JaxBackend, "create_model", out_of_memory)
        desk.restart()
    assert list(desk.backend.models()) == []
    assert "failed to restore model s:train:0" in caplog.text
    new = desk.model("s", 3)
    desk.engine.serve(lambda: desk.row(waiting + 1).status is not RequestStatus.PENDING)
    assert list(desk.backend.models()) == [new]
    assert desk.row(waiting).status is RequestStatus.PENDING
    with pytest.raises(
        RefusalError, match=r"s:train:0 could not be restored .* MemoryError: no room; restart the server"
    ):
        desk.step(lost)
    desk.restart()
    assert set(desk.backend.models()) == {lost, other, twin, new}
    desk.step(lost)
    assert desk.current_loss(lost) == expected


def test_a_model_that_is_unloaded_during_its_failing_restore(
    desk: Desk, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unloads = []

    def unload(*_: object) -> None:
        unloads.append(desk.unload(model))
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(JaxBackend, "create_model", unload)
        desk.restart()
    desk.work_until_done(*unloads)
    assert desk.result(unloads[0])


@pytest.fixture
def spoilt(desk: Desk, model: str) -> Path:
    """The folder of a restore point that cannot be read."""
    folder = point_folder(desk, model)
    (folder / str(write_point(desk, model)) / "training.json").unlink()
    return folder


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_lost_model_whose_session_has_ended_is_given_up(
    desk: Desk, model: str, spoilt: Path, is_wanted: bool
) -> None:
    """At the next start if a save is pending, and otherwise at once."""
    wanted = [desk.run_pass(model), desk.save(model)] if is_wanted else []
    desk.restart()
    desk.change(lambda db: queries.end_session(db, db.get_one(ClientSession, "s"), SessionStatus.FINISHED, ""))
    desk.fetch()
    if is_wanted:
        assert not desk.engine.work()
        assert spoilt.exists()
    desk.restart()
    for one in wanted:
        category, message = desk.error(one)
        assert f"model {model} could not be restored: FileNotFoundError" in message
        assert category == "server"
    desk.work()
    assert desk.model_row(model).status is ModelStatus.UNLOADED
    assert not spoilt.exists()


def test_a_lost_model_can_be_unloaded(desk: Desk, model: str, spoilt: Path) -> None:
    waiting = desk.run_pass(model)
    desk.restart()
    unload = desk.unload(model)
    assert desk.change(lambda db: queries.n_models(db, "org/tiny")) == 0
    desk.work()
    assert desk.result(unload)
    assert "could not be restored" in desk.error(waiting)[1]
    assert not spoilt.exists()


# -- restore points


@pytest.mark.parametrize(
    ("queue", "is_written"), [(Desk.score, True), (Desk.run_pass, False)], ids=["forward pass", "gradients"]
)
def test_gradients_delay_a_restore_point(desk: Desk, queue: Callable[[Desk, str], int], is_written: bool) -> None:
    model = desk.model()
    last_step = desk.train(model)
    queue(desk, model)
    desk.work()
    assert write_point(desk, model) == (last_step if is_written else 0)


def test_points_are_replaced_and_deleted(desk: Desk, model: str) -> None:
    for _ in range(2):
        desk.train(model)
        desk.work()
        last = write_point(desk, model)
        assert [path.name for path in point_folder(desk, model).iterdir()] == [str(last)]
    desk.unload(model)
    desk.work()
    assert not point_folder(desk, model).exists()


def test_points_are_written_between_steps(desk: Desk, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "POINT_INTERVAL_SEC", -1.0)
    last_step = desk.step(model)
    desk.work()
    assert desk.model_row(model).restored_until == last_step


def test_an_earlier_point_is_deleted_after_the_new_one_is_durable(
    desk: Desk, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if desk.database.dialect.name != "sqlite":
        pytest.skip("every commit to PostgreSQL is durable")
    first = write_point(desk, model)
    desk.train(model)
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
    write_point(desk, model)
    deleted = events.index(f"delete {first}")
    assert events[deleted - 2 : deleted] == ["FULL", "commit"]
