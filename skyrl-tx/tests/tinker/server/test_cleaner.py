from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

import pytest
from sqlmodel import select
from tx_kit.servers import config_for

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
from tx.tinker.server.cleaner import Cleaner
from tx.tinker.server.service import Service
from tx.tinker.store import queries, retention
from tx.tinker.store.checkpoint_files import checkpoint_folder, snapshot_folder, write_folder

T = TypeVar("T")
OLD = timedelta(days=3)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    started = Service(config_for(tmp_path))
    async with started.running():
        yield started


def model(session_id: str, **fields: object) -> Model:
    model_id = f"{session_id}:train:0"
    defaults = {"model_seq_id": 0, "base_model": "m", "rank": 4, "lora": {"rank": 4}, "status": ModelStatus.READY}
    return Model(model_id=model_id, session_id=session_id, **{**defaults, **fields})


class Clock:
    """A monotonic clock that moves on request."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


async def clean_later(service: Service, seconds: float = OLD.total_seconds()) -> None:
    """Clean up twice, with some time between."""
    clock = Clock()
    cleaner = Cleaner(service, clock)
    await cleaner.clean()
    clock.seconds += seconds
    await cleaner.clean()


async def see(service: Service, session_id: str, at: datetime) -> None:
    await service.write(lambda db: setattr(db.get_one(Session, session_id), "last_seen_at", at))


async def test_silent_sessions_end(service: Service) -> None:
    def fill(db: object) -> None:
        for name in ("silent", "heard"):
            db.add(Session(session_id=name))  # type: ignore[attr-defined]
            db.flush()  # type: ignore[attr-defined]
            db.add(model(name))  # type: ignore[attr-defined]

    await service.write(fill)
    clock = Clock()
    cleaner = Cleaner(service, clock)
    for _ in range(3):
        await cleaner.clean()
        await see(service, "heard", now() + timedelta(seconds=clock.seconds))
        clock.seconds += 0.7 * service.config.session_timeout_sec
    found = await service.read(lambda db: {one.session_id: one.status for one in db.exec(select(Session))})
    assert found == {"silent": SessionStatus.EXPIRED, "heard": SessionStatus.ACTIVE}
    unloads = await service.read(lambda db: [(one.kind, one.model_id) for one in db.exec(select(Request))])
    assert unloads == [(Kind.UNLOAD_MODEL, "silent:train:0")]


@pytest.mark.parametrize("jump", [OLD, -OLD])
async def test_live_sessions_survive_jumps_of_the_wall_clock(service: Service, jump: timedelta) -> None:
    """The last heartbeat seems to be days ago, or is in the future and is not replaced by later ones."""
    await service.write(lambda db: db.add(Session(session_id="live", last_seen_at=now() - jump)))
    snapshot = snapshot_folder(service.config, "live:sample:1")
    snapshot.mkdir(parents=True)
    os.utime(snapshot, (0, 0))
    clock = Clock()
    cleaner = Cleaner(service, clock)
    for _ in range(5):
        await cleaner.clean()
        await service.write(lambda db: queries.active_session(db, "live", "local"))
        clock.seconds += 0.3 * service.config.session_timeout_sec
    found = await service.read(lambda db: db.get_one(Session, "live"))
    assert found.status is SessionStatus.ACTIVE
    assert snapshot.is_dir()


async def test_session_expiry_can_be_disabled(tmp_path: Path) -> None:
    service = Service(config_for(tmp_path, session_timeout_sec=-1))
    async with service.running():
        await service.write(lambda db: db.add(Session(session_id="silent")))
        await clean_later(service)
        found = await service.read(lambda db: db.get(Session, "silent"))
    assert found is not None
    assert found.status is SessionStatus.ACTIVE


async def test_expired_checkpoints(service: Service) -> None:
    defaults = {"kind": CheckpointKind.TRAINING, "base_model": "m", "lora": {}, "size_bytes": 1}
    over = Checkpoint(model_id="a:train:0", name="over", expires_at=now() - OLD, **defaults)
    stays = [
        Checkpoint(model_id="a:train:0", name="later", expires_at=now() + OLD, **defaults),
        Checkpoint(model_id="a:train:0", name="always", **defaults),
    ]
    for one in (over, *stays):
        checkpoint_folder(service.config, one.path).mkdir(parents=True)
    await service.write(lambda db: db.add_all([over, *stays]))
    await Cleaner(service).clean()
    left = await service.read(lambda db: sorted(one.name for one in db.exec(select(Checkpoint))))
    folder = service.config.checkpoints_base / "a_train_0" / "weights"
    assert left == sorted(one.name for one in folder.iterdir()) == ["always", "later"]


async def test_a_freed_name_can_be_reused_at_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {"kind": CheckpointKind.TRAINING, "base_model": "m", "lora": {}, "size_bytes": 1}
    over = Checkpoint(model_id="a:train:0", name="x", expires_at=now() - OLD, **defaults)
    folder = checkpoint_folder(service.config, over.path)
    folder.mkdir(parents=True)
    await service.write(lambda db: db.add(over))
    write = service.write
    key = (over.model_id, over.kind, over.name)
    saved: list[str] = []

    async def write_and_save(change: Callable[[object], T]) -> T:
        """Save like an engine as soon as the row is gone."""
        written = await write(change)
        if not saved and await service.read(lambda db: db.get(Checkpoint, key)) is None:
            saved.append("new")
            write_folder(folder, lambda unnamed: (unnamed / "new").touch())
        return written

    monkeypatch.setattr(service, "write", write_and_save)
    await Cleaner(service).clean()
    assert [file.name for file in folder.iterdir()] == saved == ["new"]
    assert [one.name for one in folder.parent.iterdir()] == ["x"]


async def test_old_results_are_deleted_in_batches(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_ROWS", 2)
    old = {"status": RequestStatus.DONE, "completed_at": now() - OLD, "kind": Kind.SAMPLE, "payload_hash": ""}
    rows = [Request(session_id="s", payload=b"p", result=b"r", **old) for _ in range(5)]
    await service.write(lambda db: db.add_all([Session(session_id="s"), *rows]))
    assert await service.write(lambda db: retention.delete_results(db, 1.0)) == 2
    await Cleaner(service).clean()
    left = await service.read(lambda db: [(one.payload, one.result) for one in db.exec(select(Request))])
    assert left == [(b"", None)] * 5


async def test_payloads_are_deleted_once_no_restore_needs_them(service: Service) -> None:
    def fill(db: object) -> None:
        fields = {"kind": Kind.FORWARD_BACKWARD, "payload": b"p", "payload_hash": "h", "completed_at": now()}
        db.add(Session(session_id="s"))  # type: ignore[attr-defined]
        db.flush()  # type: ignore[attr-defined]
        db.add(model("s", restored_until=1))  # type: ignore[attr-defined]
        for number, status in enumerate(("done", "done", "pending"), start=1):
            one = Request(request_id=number, model_id="s:train:0", status=status, result=b"r", **fields)
            db.add(one)  # type: ignore[attr-defined]

    await service.write(fill)
    await Cleaner(service).clean()
    left = await service.read(lambda db: [(one.payload, one.result) for one in db.exec(select(Request))])
    assert left == [(b"", b"r"), (b"p", b"r"), (b"p", b"r")]


async def test_requests_that_a_restore_needs_are_kept(service: Service) -> None:
    """Requests after a model's restore point are repeated when an engine restarts."""

    def request(model_id: str | None, **fields: object) -> Request:
        defaults = {"status": RequestStatus.DONE, "completed_at": now() - OLD, "kind": Kind.OPTIM_STEP, "payload": b"p"}
        return Request(model_id=model_id, payload_hash="h", result=b"r", **{**defaults, **fields})

    def fill(db: object) -> None:
        db.add(Session(session_id="s"))  # type: ignore[attr-defined]
        db.add(Session(session_id="t"))  # type: ignore[attr-defined]
        db.flush()  # type: ignore[attr-defined]
        db.add(model("s", restored_until=2))  # type: ignore[attr-defined]
        db.add(model("t", status=ModelStatus.UNLOADED))  # type: ignore[attr-defined]
        for number, one in enumerate(
            [
                request("s:train:0"),  # 1: before the restore point
                request("s:train:0"),  # 2: the restore point
                request("s:train:0"),  # 3: after it
                request("t:train:0"),  # 4: its model is gone
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
    rows = await service.read(lambda db: db.exec(select(Request)).all())
    assert {one.request_id for one in rows if one.payload} == {3, 7}
    assert {one.request_id for one in rows if one.result} == {6, 7}


async def test_requests_of_ended_sessions_are_deleted(service: Service) -> None:
    def request(session_id: str | None, model_id: str | None = None, **fields: object) -> Request:
        defaults = {"status": RequestStatus.DONE, "completed_at": now() - OLD, "kind": Kind.SAMPLE, "payload": b"p"}
        return Request(session_id=session_id, model_id=model_id, payload_hash="h", **{**defaults, **fields})

    def fill(db: object) -> None:
        db.add(Session(session_id="active"))  # type: ignore[attr-defined]
        for name in ("ended", "stuck"):
            db.add(Session(session_id=name, status=SessionStatus.FINISHED))  # type: ignore[attr-defined]
        db.flush()  # type: ignore[attr-defined]
        db.add(model("ended", status=ModelStatus.UNLOADED))  # type: ignore[attr-defined]
        db.add(model("stuck", status=ModelStatus.UNLOADING))  # type: ignore[attr-defined]
        for number, one in enumerate(
            [
                request("active"),  # 1: may be fetched again
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


async def test_numbers_of_deleted_requests_are_not_reused(service: Service) -> None:
    def add(db: object) -> int:
        one = Request(kind=Kind.SAMPLE, payload=b"", payload_hash="", completed_at=now() - OLD, status="done")
        db.add(one)  # type: ignore[attr-defined]
        db.flush()  # type: ignore[attr-defined]
        return one.request_id or 0

    first = await service.write(add)
    await Cleaner(service).clean()
    assert await service.write(add) == first + 1


async def test_snapshots_of_ended_sessions(service: Service) -> None:
    def fill(db: object) -> None:
        db.add(Session(session_id="active"))  # type: ignore[attr-defined]
        db.add(Session(session_id="ended", status=SessionStatus.FINISHED))  # type: ignore[attr-defined]

    await service.write(fill)
    base = service.config.checkpoints_base
    for name in ("active", "ended", "unknown"):
        snapshot_folder(service.config, f"{name}:sample:3").mkdir(parents=True)
    await Cleaner(service).clean()
    assert [path.relative_to(base).as_posix() for path in base.glob("snapshots/*/*")] == ["snapshots/active/3"]


async def test_unused_snapshots(service: Service) -> None:
    await service.write(lambda db: db.add(Session(session_id="s")))
    used, unused = (snapshot_folder(service.config, f"s:sample:{number}") for number in range(2))
    clock = Clock()
    cleaner = Cleaner(service, clock)
    for folder in (used, unused):
        folder.mkdir(parents=True)
    for number in range(3):
        await see(service, "s", now() + timedelta(seconds=clock.seconds))
        await cleaner.clean()
        os.utime(used, (number, number))
        clock.seconds += 0.7 * service.config.snapshot_retention_sec
    assert used.is_dir()
    assert not unused.exists()


async def test_a_session_keeps_its_last_snapshots(tmp_path: Path) -> None:
    service = Service(config_for(tmp_path, max_snapshots_per_session=2))
    async with service.running():
        await service.write(lambda db: db.add_all([Session(session_id="s"), Session(session_id="t")]))
        for number, used in enumerate((7, 9, 5, 8)):
            folder = snapshot_folder(service.config, f"s:sample:{number}")
            folder.mkdir(parents=True)
            os.utime(folder, (used, used))
        snapshot_folder(service.config, "t:sample:0").mkdir(parents=True)
        await Cleaner(service).clean()
    base = service.config.checkpoints_base / "snapshots"
    assert sorted(path.relative_to(base).as_posix() for path in base.glob("*/*")) == ["s/1", "s/3", "t/0"]


async def test_leftovers_of_killed_processes(service: Service) -> None:
    base = service.config.checkpoints_base
    leftovers = ["a_train_0/weights/.unfinished-1", "restore/a_train_0/.deleted-2", "snapshots/.deleted-3"]
    for name in (*leftovers, "snapshots/.deleted-new", "a_train_0/weights/there"):
        (base / name).mkdir(parents=True)
    clock = Clock()
    cleaner = Cleaner(service, clock)
    await cleaner.clean()
    clock.seconds += OLD.total_seconds()
    os.utime(base / "snapshots/.deleted-new", (0, 0))
    await cleaner.clean()
    assert not any((base / name).exists() for name in leftovers)
    assert (base / "snapshots/.deleted-new").is_dir()
    assert (base / "a_train_0/weights/there").is_dir()
