"""What the cleaner ends and deletes. The tests set its clock."""

import os
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tx_kit.rows import add_rows, change_row, checkpoint_row, model_row, read_row, read_rows, request_row
from tx_kit.servers import config_for

from tx.tinker.db_models import (
    Checkpoint,
    ClientSession,
    Kind,
    Model,
    ModelStatus,
    RequestStatus,
    SessionStatus,
    TxRequest,
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


class Clock:
    """A monotonic clock that moves on request."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def session(name: str, status: SessionStatus = SessionStatus.ACTIVE, **fields: Any) -> ClientSession:
    return ClientSession(session_id=name, status=status, **fields)


def model(session_id: str, status: ModelStatus = ModelStatus.READY, **fields: Any) -> Model:
    return model_row(session_id, status=status, **fields)


def request(model_id: str | None = None, age: timedelta = OLD, **fields: Any) -> TxRequest:
    """A finished request, by default an old one."""
    done = {"status": RequestStatus.DONE, "completed_at": now() - age, "result": b"r"}
    return request_row(model_id=model_id, **(done | fields))


NEW = timedelta()
PENDING: dict[str, Any] = {"status": RequestStatus.PENDING, "completed_at": None, "result": None}


async def test_silent_sessions_end(service: Service) -> None:
    for name in ("silent", "heard"):
        add_rows(service.database, session(name), model(name))
    clock = Clock()
    cleaner = Cleaner(service, clock)
    for _ in range(3):
        await cleaner.clean()
        change_row(service.database, ClientSession, "heard", last_seen_at=now() + timedelta(seconds=clock.seconds))
        clock.seconds += 0.7 * service.config.session_timeout_sec
    found = {one.session_id: one.status for one in read_rows(service.database, ClientSession)}
    assert found == {"silent": SessionStatus.EXPIRED, "heard": SessionStatus.ACTIVE}
    unloads = [(one.kind, one.model_id) for one in read_rows(service.database, TxRequest)]
    assert unloads == [(Kind.UNLOAD_MODEL, "silent:train:0")]


@pytest.mark.parametrize("jump", [OLD, -OLD])
async def test_live_sessions_survive_jumps_of_the_wall_clock(service: Service, jump: timedelta) -> None:
    """The last heartbeat seems to be days ago, or is in the future and is not replaced by later ones."""
    add_rows(service.database, session("live", last_seen_at=now() - jump))
    snapshot = snapshot_folder(service.config, "live:sample:1")
    snapshot.mkdir(parents=True)
    os.utime(snapshot, (0, 0))
    clock = Clock()
    cleaner = Cleaner(service, clock)
    for _ in range(5):
        await cleaner.clean()
        await service.write(lambda db: queries.active_session(db, "live", "local"))
        clock.seconds += 0.3 * service.config.session_timeout_sec
    assert read_row(service.database, ClientSession, "live").status is SessionStatus.ACTIVE
    assert snapshot.is_dir()


async def test_session_expiry_can_be_disabled(tmp_path: Path) -> None:
    service = Service(config_for(tmp_path, session_timeout_sec=-1))
    async with service.running():
        add_rows(service.database, session("silent"))
        clock = Clock()
        cleaner = Cleaner(service, clock)
        for _ in range(2):
            await cleaner.clean()
            clock.seconds += OLD.total_seconds()
        assert read_row(service.database, ClientSession, "silent").status is SessionStatus.ACTIVE


async def test_expired_checkpoints(service: Service) -> None:
    times = {"over": now() - OLD, "later": now() + OLD, "always": None}
    checkpoints = [checkpoint_row("a:train:0", name, expires_at=at) for name, at in times.items()]
    for one in checkpoints:
        checkpoint_folder(service.config, one.path).mkdir(parents=True)
    add_rows(service.database, *checkpoints)
    await Cleaner(service).clean()
    folder = service.config.checkpoints_base / "a_train_0" / "weights"
    left = [one.name for one in read_rows(service.database, Checkpoint)]
    assert left == sorted(one.name for one in folder.iterdir()) == ["always", "later"]


async def test_a_freed_name_can_be_reused_at_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    over = checkpoint_row("a:train:0", expires_at=now() - OLD)
    folder = checkpoint_folder(service.config, over.path)
    folder.mkdir(parents=True)
    add_rows(service.database, over)
    write = service.write
    saved: list[str] = []

    async def write_and_save(change: Callable[[object], T]) -> T:
        """Save like an engine as soon as the row is gone."""
        written = await write(change)
        if not saved and not read_rows(service.database, Checkpoint):
            saved.append("new")
            write_folder(folder, lambda unnamed: (unnamed / "new").touch())
        return written

    monkeypatch.setattr(service, "write", write_and_save)
    await Cleaner(service).clean()
    assert [file.name for file in folder.iterdir()] == saved == ["new"]
    assert [one.name for one in folder.parent.iterdir()] == ["x"]


async def test_old_requests_are_deleted_in_batches(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion blocks other writers."""
    monkeypatch.setattr(retention, "MAX_ROWS", 2)
    kept, deleted = ([request(session_id=name) for _ in range(5)] for name in ("s", None))
    add_rows(service.database, session("s"), *kept, *deleted)
    for delete in (retention.clear_results, retention.delete_requests):
        assert await service.write(partial(delete, retention=1.0)) == 2
    await Cleaner(service).clean()
    assert [(one.payload, one.result) for one in read_rows(service.database, TxRequest)] == [(b"", None)] * 5


async def test_requests_are_kept_as_long_as_they_are_needed(service: Service) -> None:
    """A payload may be repeated by a restore, a result may be fetched again, and a row may be asked for."""
    nothing = ("", "")  # payload and result
    rows = {
        "before the restore point": (request("s:train:0"), nothing),
        "at the restore point": (request("s:train:0"), nothing),
        "after the restore point": (request("s:train:0"), ("p", "")),
        "of an unloaded model": (request("t:train:0"), None),
        "pending, of an unloaded model": (request("t:train:0", **PENDING), ("p", "")),
        "new, at another restore point": (request("u:train:0", NEW), ("", "r")),
        "new, after another restore point": (request("u:train:0", NEW), ("p", "r")),
        "pending after it": (request("u:train:0", **PENDING), ("p", "")),
        "of an active session": (request(session_id="s"), nothing),
        "of an ended session": (request(session_id="ended"), None),
        "of a model of an ended session": (request("ended:train:0", session_id="ended"), None),
        "of a model that may have to be restored": (request("stuck:train:0", session_id="stuck"), ("p", "")),
        "without a session": (request(), None),
        "new": (request(age=NEW), ("", "r")),
        "pending": (request(**PENDING), ("p", "")),
    }
    sessions = [session(name) for name in "stu"]
    sessions += [session(name, SessionStatus.FINISHED) for name in ("ended", "stuck")]
    models = [model("s", restored_until=2), model("t", ModelStatus.UNLOADED), model("u", restored_until=6)]
    models += [model("ended", ModelStatus.UNLOADED), model("stuck", ModelStatus.UNLOADING)]
    numbers = {name: number for number, name in enumerate(rows, start=1)}
    for name, (row, _) in rows.items():
        row.request_id = numbers[name]
    add_rows(service.database, *sessions, *models, *(row for row, _ in rows.values()))
    await Cleaner(service).clean()
    left = {one.request_id: (one.payload, one.result or b"") for one in read_rows(service.database, TxRequest)}
    found = {name: left.get(number) for name, number in numbers.items()}
    assert found == {name: kept and tuple(part.encode() for part in kept) for name, (_, kept) in rows.items()}


async def test_numbers_of_deleted_requests_are_not_reused(service: Service) -> None:
    add_rows(service.database, request())
    (first,) = read_rows(service.database, TxRequest)
    await Cleaner(service).clean()
    add_rows(service.database, request())
    (second,) = read_rows(service.database, TxRequest)
    assert second.request_id == first.request_id + 1  # type: ignore[operator]


def folders(service: Service, pattern: str) -> list[str]:
    """Return the folders in the state that match a pattern."""
    base = service.config.checkpoints_base
    return sorted(path.relative_to(base).as_posix() for path in base.glob(pattern))


async def test_snapshots_of_ended_sessions(service: Service) -> None:
    add_rows(service.database, session("active"), session("ended", SessionStatus.FINISHED))
    for name in ("active", "ended", "unknown"):
        snapshot_folder(service.config, f"{name}:sample:3").mkdir(parents=True)
    await Cleaner(service).clean()
    assert folders(service, "snapshots/*/*") == ["snapshots/active/3"]


async def test_unused_snapshots(service: Service) -> None:
    add_rows(service.database, session("s"))
    used, unused = (snapshot_folder(service.config, f"s:sample:{number}") for number in range(2))
    for folder in (used, unused):
        folder.mkdir(parents=True)
    clock = Clock()
    cleaner = Cleaner(service, clock)
    for number in range(3):
        change_row(service.database, ClientSession, "s", last_seen_at=now() + timedelta(seconds=clock.seconds))
        await cleaner.clean()
        os.utime(used, (number, number))
        clock.seconds += 0.7 * service.config.snapshot_retention_sec
    assert used.is_dir()
    assert not unused.exists()


async def test_a_session_keeps_its_last_snapshots(tmp_path: Path) -> None:
    service = Service(config_for(tmp_path, max_snapshots_per_session=2))
    async with service.running():
        add_rows(service.database, session("s"), session("t"))
        for number, used_at in enumerate((7, 9, 5, 8)):
            folder = snapshot_folder(service.config, f"s:sample:{number}")
            folder.mkdir(parents=True)
            os.utime(folder, (used_at, used_at))
        snapshot_folder(service.config, "t:sample:0").mkdir(parents=True)
        await Cleaner(service).clean()
    assert folders(service, "snapshots/*/*") == ["snapshots/s/1", "snapshots/s/3", "snapshots/t/0"]


async def test_leftovers_of_killed_processes(service: Service) -> None:
    base = service.config.checkpoints_base
    leftovers = ["a_train_0/weights/.unfinished-1", "restore/a_train_0/.deleted-2", "snapshots/.deleted-3"]
    others = ["a_train_0/weights/there", "snapshots/.deleted-new"]
    for name in (*leftovers, *others):
        (base / name).mkdir(parents=True)
    clock = Clock()
    cleaner = Cleaner(service, clock)
    await cleaner.clean()
    clock.seconds += OLD.total_seconds()
    os.utime(base / "snapshots/.deleted-new", (0, 0))  # it was written to in the meantime
    await cleaner.clean()
    assert not any((base / name).exists() for name in leftovers)
    assert all((base / name).is_dir() for name in others)
