from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine as Database
from sqlmodel import select
from tx_kit.rows import add_rows, change_row, checkpoint_row, model_row, read_rows
from tx_kit.servers import config_for

from tx.tinker.config import TxConfig
from tx.tinker.db_models import Checkpoint, ClientSession, Model, ModelStatus, SessionStatus
from tx.tinker.refusal import RefusalError
from tx.tinker.store import copying
from tx.tinker.store.checkpoint_files import checkpoint_folder, delete_folder
from tx.tinker.store.database import reading, writing
from tx.tinker.wire.requests import CopyWeightsRequest

KEY = ("s:train:0", "weights", "x")
SOURCE = "tinker://s:train:0/weights/x"


@pytest.fixture
def config(tmp_path: Path) -> TxConfig:
    return config_for(tmp_path)


@pytest.fixture
def database(config: TxConfig, database: Database) -> Database:
    """A database with a user who has a checkpoint, and one who has a session."""
    sessions = [ClientSession(session_id="s", owner="alice"), ClientSession(session_id="t", owner="bob")]
    add_rows(database, *sessions, model_row(), checkpoint_row(size_bytes=7, user_metadata={"a": "b"}))
    folder = checkpoint_folder(config, SOURCE)
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_bytes(b"weights")
    return database


def copy(config: TxConfig, database: Database, owner: str = "alice", key: str | None = None, **fields: Any) -> str:
    body = CopyWeightsRequest.model_validate({"source_path": SOURCE, **fields})
    target = copying.target_path(owner, body, key)
    with reading(database) as db:
        is_new = copying.check_copy(db, owner, body, target)
    if is_new:
        complete = copying.copy_files(config, SOURCE, target)
        with writing(database) as db:
            copying.record_copy(db, owner, config, body, target, complete)
    return target


def test_a_copy_is_independent(config: TxConfig, database: Database) -> None:
    target = copy(config, database, destination_project_id="p", ttl_seconds=7200)
    delete_folder(checkpoint_folder(config, SOURCE))
    assert (checkpoint_folder(config, target) / "deep" / "file").read_bytes() == b"weights"
    with reading(database) as db:
        found = db.exec(select(Checkpoint).where(Checkpoint.model_id != "s:train:0")).one()
        model, session = db.get_one(Model, found.model_id), db.get_one(ClientSession, found.model_id.partition(":")[0])
    assert (found.path, found.size_bytes, found.user_metadata) == (target, 7, {"a": "b"})
    assert found.expires_at is not None
    assert (model.status, model.rank) == (ModelStatus.UNLOADED, 4)
    assert (session.project_id, session.owner, session.status) == ("p", "alice", SessionStatus.FINISHED)


def test_a_repeated_copy_is_the_same_copy(config: TxConfig, database: Database) -> None:
    body = {"destination_project_id": "p"}
    assert copy(config, database, key="k", **body) == copy(config, database, key="k", **body)
    assert copy(config, database, key="l", **body) != copy(config, database, key=None, **body)
    into = {"session_id": "s", "model_seq_id": 5}
    assert copy(config, database, **into) == copy(config, database, **into) == "tinker://s:train:5/weights/x"
    assert len(read_rows(database, Checkpoint)) == 5


def test_a_copy_that_is_not_recorded_has_no_files(config: TxConfig, database: Database) -> None:
    body = CopyWeightsRequest(source_path=SOURCE, session_id="s", model_seq_id=5)
    target = copying.target_path("alice", body, None)
    complete = copying.copy_files(config, SOURCE, target)
    with writing(database) as db:
        db.delete(db.get_one(Checkpoint, KEY))
    with pytest.raises(RefusalError, match="there is no checkpoint"), writing(database) as db:
        copying.record_copy(db, "alice", config, body, target, complete)
    assert not checkpoint_folder(config, target).exists()


def test_copies_of_public_checkpoints(config: TxConfig, database: Database) -> None:
    with pytest.raises(RefusalError, match="there is no checkpoint"):
        copy(config, database, "bob", session_id="t", model_seq_id=0)
    change_row(database, Checkpoint, KEY, is_public=True)
    assert copy(config, database, "bob", session_id="t", model_seq_id=0) == "tinker://t:train:0/weights/x"
    with pytest.raises(RefusalError, match="there is no session"):
        copy(config, database, "bob", session_id="s", model_seq_id=1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "takes either destination_project_id, or session_id and model_seq_id"),
        ({"session_id": "s"}, "takes either"),
        ({"session_id": "s", "model_seq_id": 7}, "model s:train:7 already exists"),
        ({"session_id": "s", "model_seq_id": 0, "source_path": f"{SOURCE}y"}, "there is no checkpoint"),
    ],
)
def test_refused_copies(config: TxConfig, database: Database, fields: dict[str, Any], words: str) -> None:
    add_rows(database, model_row(number=7))
    with pytest.raises(RefusalError, match=words):
        copy(config, database, **fields)


def test_deleted_files(config: TxConfig, database: Database) -> None:
    delete_folder(checkpoint_folder(config, SOURCE))
    with pytest.raises(RefusalError, match=r"the files of .* are gone") as refused:
        copy(config, database, destination_project_id="p")
    assert refused.value.status == 404
    assert not list(config.checkpoints_base.rglob(".unfinished-*"))
