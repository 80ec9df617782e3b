from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
from sqlmodel import select
from tx_server import config_for

from tx.tinker import retention
from tx.tinker.checkpoint_files import checkpoint_folder, snapshot_folder, write_folder
from tx.tinker.cleaner import Cleaner
from tx.tinker.db_models import (
    Checkpoint,
    CheckpointKind,
    Kind,
    Model,
    ModelStatus,
    Request,
    RequestStatus,
    Session,
    SessionStatus,
    now,
)
from tx.tinker.service import Service

T = TypeVar("T")
OLD = timedelta(days=3)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    started = Service(config_for(tmp_path))
    async with started.running():
        yield started


def model(session_id: str, **fields: object) -> Model:
    model_id = f"{session_id}:train:0"
    told = {"model_seq_id": 0, "base_model": "m", "rank": 4, "lora": {"rank": 4}, "status": ModelStatus.READY}
    return Model(model_id=model_id, session_id=session_id, **{**told, **fields})


async def test_sessions_that_are_silent_end(service: Service) -> None:
    def fill(db: object) -> None:
        for name, seen in (("silent", now() - OLD), ("heard", now())):
            db.add(Session(session_id=name, last_seen_at=seen))  # type: ignore[attr-defined]
            db.flush()  # type: ignore[attr-defined]
            db.add(model(name))  # type: ignore[attr-defined]

    await service.write(fill)
    for _ in range(2):
        await Cleaner(service).clean()
    found = await service.read(lambda db: {one.session_id: one.status for one in db.exec(select(Session))})
    assert found == {"silent": SessionStatus.EXPIRED, "heard": SessionStatus.ACTIVE}
    asked = await service.read(lambda db: [(one.kind, one.model_id) for one in db.exec(select(Request))])
    assert asked == [(Kind.UNLOAD_MODEL, "silent:train:0")]


async def test_sessions_may_stay_for_ever(tmp_path: Path) -> None:
    service = Service(config_for(tmp_path, session_timeout_sec=-1))
    async with service.running():
        await service.write(lambda db: db.add(Session(session_id="silent", last_seen_at=now() - OLD)))
        await Cleaner(service).clean()
        found = await service.read(lambda db: db.get(Session, "silent"))
    assert found is not None
    assert found.status is SessionStatus.ACTIVE


async def test_checkpoints_whose_time_is_over(service: Service) -> None:
    told = {"kind": CheckpointKind.TRAINING, "base_model": "m", "lora": {}, "size_bytes": 1}
    over = Checkpoint(model_id="a:train:0", name="over", expires_at=now() - OLD, **told)
    stays = [
        Checkpoint(model_id="a:train:0", name="later", expires_at=now() + OLD, **told),
        Checkpoint(model_id="a:train:0", name="always", **told),
    ]
    for one in (over, *stays):
        checkpoint_folder(service.config, one.path).mkdir(parents=True)
    await service.write(lambda db: db.add_all([over, *stays]))
    await Cleaner(service).clean()
    left = await service.read(lambda db: sorted(one.name for one in db.exec(select(Checkpoint))))
    folder = service.config.checkpoints_base / "a_train_0" / "weights"
    assert left == sorted(one.name for one in folder.iterdir()) == ["always", "later"]


async def test_a_name_that_is_free_again_is_taken_at_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"kind": CheckpointKind.TRAINING, "base_model": "m", "lora": {}, "size_bytes": 1}
    over = Checkpoint(model_id="a:train:0", name="x", expires_at=now() - OLD, **told)
    folder = checkpoint_folder(service.config, over.path)
    folder.mkdir(parents=True)
    await service.write(lambda db: db.add(over))
    write = service.write
    key = (over.model_id, over.kind, over.name)
    saved: list[str] = []

    async def write_and_save(change: Callable[[object], T]) -> T:
        """An engine saves as soon as the row is gone."""
        written = await write(change)
        if not saved and await service.read(lambda db: db.get(Checkpoint, key)) is None:
            saved.append("new")
            write_folder(folder, lambda unnamed: (unnamed / "new").touch())
        return written

    monkeypatch.setattr(service, "write", write_and_save)
    await Cleaner(service).clean()
    assert [file.name for file in folder.iterdir()] == saved == ["new"]
    assert [one.name for one in folder.parent.iterdir()] == ["x"]


async def test_many_old_results_go_in_parts(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MOST_AT_ONCE", 2)
    old = {"status": RequestStatus.DONE, "completed_at": now() - OLD, "kind": Kind.SAMPLE, "payload_hash": ""}
    told = [Request(session_id="s", payload=b"p", result=b"r", **old) for _ in range(5)]
    await service.write(lambda db: db.add_all([Session(session_id="s"), *told]))
    assert await service.write(lambda db: retention.forget_results(db, 1.0)) == 2
    await Cleaner(service).clean()
    left = await service.read(lambda db: [(one.payload, one.result) for one in db.exec(select(Request))])
    assert left == [(b"", None)] * 5


async def test_what_an_engine_may_need_is_kept(service: Service) -> None:
    """Requests after a model's restore point are done again when an engine is started again."""

    def request(model_id: str | None, **fields: object) -> Request:
        told = {"status": RequestStatus.DONE, "completed_at": now() - OLD, "kind": Kind.OPTIM_STEP, "payload": b"p"}
        return Request(model_id=model_id, payload_hash="h", result=b"r", **{**told, **fields})

    def fill(db: object) -> None:
        db.add(Session(session_id="s"))  # type: ignore[attr-defined]
        db.add(Session(session_id="t"))  # type: ignore[attr-defined]
        db.flush()  # type: ignore[attr-defined]
        db.add(model("s", restored_until=2))  # type: ignore[attr-defined]
        db.add(model("t", status=ModelStatus.UNLOADED))  # type: ignore[attr-defined]
        for number, one in enumerate(
            [
                request("s:train:0"),  # 1: before the restore point
                request("s:train:0"),  # 2: it
                request("s:train:0"),  # 3: after it
                request("t:train:0"),  # 4: of a model that is gone
                request(None, kind=Kind.SAMPLE),  # 5
                request(None, completed_at=now()),  # 6: new
                request("t:train:0", status=RequestStatus.PENDING, completed_at=None),  # 7
            ],
            start=1,
        ):
            one.request_id = number
            db.add(one)  # type: ignore[attr-defined]

    await service.write(fill)
    await Cleaner(service).clean()
    kept = await service.read(lambda db: {one.request_id for one in db.exec(select(Request)) if one.payload})
    assert kept == {3, 6, 7}


async def test_requests_of_sessions_that_have_ended_are_deleted(service: Service) -> None:
    def request(session_id: str | None, model_id: str | None = None, **fields: object) -> Request:
        told = {"status": RequestStatus.DONE, "completed_at": now() - OLD, "kind": Kind.SAMPLE, "payload": b"p"}
        return Request(session_id=session_id, model_id=model_id, payload_hash="h", **{**told, **fields})

    def fill(db: object) -> None:
        db.add(Session(session_id="active"))  # type: ignore[attr-defined]
        for name in ("ended", "stuck"):
            db.add(Session(session_id=name, status=SessionStatus.FINISHED))  # type: ignore[attr-defined]
        db.flush()  # type: ignore[attr-defined]
        db.add(model("ended", status=ModelStatus.UNLOADED))  # type: ignore[attr-defined]
        db.add(model("stuck", status=ModelStatus.UNLOADING))  # type: ignore[attr-defined]
        for number, one in enumerate(
            [
                request("active"),  # 1: may be asked for
                request("ended"),  # 2
                request("ended", "ended:train:0"),  # 3
                request("stuck", "stuck:train:0"),  # 4: its model may have to be restored
                request(None),  # 5
                request(None, completed_at=now()),  # 6: new
                request(None, status=RequestStatus.PENDING, completed_at=None),  # 7
            ],
            start=1,
        ):
            one.request_id = number
            db.add(one)  # type: ignore[attr-defined]

    await service.write(fill)
    await Cleaner(service).clean()
    left = await service.read(lambda db: {one.request_id for one in db.exec(select(Request))})
    assert left == {1, 4, 6, 7}


async def test_numbers_of_deleted_requests_are_not_given_again(service: Service) -> None:
    def add(db: object) -> int:
        one = Request(kind=Kind.SAMPLE, payload=b"", payload_hash="", completed_at=now() - OLD, status="done")
        db.add(one)  # type: ignore[attr-defined]
        db.flush()  # type: ignore[attr-defined]
        return one.request_id or 0

    first = await service.write(add)
    await Cleaner(service).clean()
    assert await service.write(add) == first + 1


async def test_snapshots_of_sessions_that_have_ended(service: Service) -> None:
    def fill(db: object) -> None:
        db.add(Session(session_id="active"))  # type: ignore[attr-defined]
        db.add(Session(session_id="silent", last_seen_at=now() - OLD))  # type: ignore[attr-defined]

    await service.write(fill)
    base = service.config.checkpoints_base
    for name in ("active", "silent", "unknown"):
        snapshot_folder(service.config, f"{name}:sample:3").mkdir(parents=True)
    unused = snapshot_folder(service.config, "active:sample:4")
    unused.mkdir()
    os.utime(unused, (0, 0))
    await Cleaner(service).clean()
    assert [path.relative_to(base).as_posix() for path in base.glob("snapshots/*/*")] == ["snapshots/active/3"]


async def test_what_was_left_behind(service: Service) -> None:
    base = service.config.checkpoints_base
    told = ["a_train_0/weights/.unfinished-1", "restore/a_train_0/.deleted-2", "snapshots/.deleted-3"]
    for name in (*told, "snapshots/.deleted-new", "a_train_0/weights/there"):
        (base / name).mkdir(parents=True)
    for name in told:
        os.utime(base / name, (0, 0))
    await Cleaner(service).clean()
    assert not any((base / name).exists() for name in told)
    assert (base / "snapshots/.deleted-new").is_dir()
    assert (base / "a_train_0/weights/there").is_dir()
