from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine as Database
from sqlmodel import select
from tx_server import config_for

from tx.tinker import copying
from tx.tinker.checkpoint_files import checkpoint_folder, delete_folder
from tx.tinker.config import TxConfig
from tx.tinker.database import reading, writing
from tx.tinker.db_models import Checkpoint, CheckpointKind, Model, ModelStatus, Session, SessionStatus
from tx.tinker.refusal import Refusal
from tx.tinker.wire.requests import CopyWeightsRequest

SOURCE = "tinker://s:train:0/weights/x"


@pytest.fixture
def config(tmp_path: Path) -> TxConfig:
    return config_for(tmp_path)


@pytest.fixture
def database(config: TxConfig, database: Database) -> Database:
    """Of a user who has a checkpoint, and of one who has a session."""
    with writing(database) as db:
        db.add_all([Session(session_id="s", owner="alice"), Session(session_id="t", owner="bob")])
        db.flush()
        db.add(Model(model_id="s:train:0", session_id="s", model_seq_id=0, base_model="m", rank=4, lora={"rank": 4}))
        told = {"base_model": "m", "lora": {"rank": 4}, "size_bytes": 7, "user_metadata": {"a": "b"}}
        db.add(Checkpoint(model_id="s:train:0", kind=CheckpointKind.TRAINING, name="x", **told))
    folder = checkpoint_folder(config, SOURCE)
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_bytes(b"weights")
    return database


def copy(config: TxConfig, database: Database, owner: str = "alice", key: str | None = None, **told: Any) -> str:
    """As the route does it."""
    asked = CopyWeightsRequest.model_validate({"source_path": SOURCE, **told})
    target = copying.target_path(owner, asked, key)
    with reading(database) as db:
        is_new = copying.check_copy(db, owner, asked, target)
    if is_new:
        complete = copying.copy_files(config, SOURCE, target)
        with writing(database) as db:
            copying.record_copy(db, owner, config, asked, target, complete)
    return target


def test_a_copy_is_a_checkpoint_of_its_own(config: TxConfig, database: Database) -> None:
    target = copy(config, database, destination_project_id="p", ttl_seconds=7200)
    delete_folder(checkpoint_folder(config, SOURCE))
    assert (checkpoint_folder(config, target) / "deep" / "file").read_bytes() == b"weights"
    with reading(database) as db:
        found = db.exec(select(Checkpoint).where(Checkpoint.model_id != "s:train:0")).one()
        model, session = db.get_one(Model, found.model_id), db.get_one(Session, found.model_id.partition(":")[0])
    assert (found.path, found.size_bytes, found.user_metadata) == (target, 7, {"a": "b"})
    assert found.expires_at is not None
    assert (model.status, model.rank) == (ModelStatus.UNLOADED, 4)
    assert (session.project_id, session.owner, session.status) == ("p", "alice", SessionStatus.FINISHED)


def test_the_same_copy_twice_is_one(config: TxConfig, database: Database) -> None:
    asked = {"destination_project_id": "p"}
    assert copy(config, database, key="k", **asked) == copy(config, database, key="k", **asked)
    assert copy(config, database, key="l", **asked) != copy(config, database, key=None, **asked)
    into = {"session_id": "s", "model_seq_id": 5}
    assert copy(config, database, **into) == copy(config, database, **into) == "tinker://s:train:5/weights/x"
    with reading(database) as db:
        assert len(db.exec(select(Checkpoint)).all()) == 5


def test_keys_of_users_are_apart(config: TxConfig, database: Database) -> None:
    with writing(database) as db:
        db.get_one(Checkpoint, ("s:train:0", "weights", "x")).is_public = True
    asked = {"destination_project_id": "p"}
    assert copy(config, database, "alice", key="k", **asked) != copy(config, database, "bob", key="k", **asked)


def test_a_copy_that_is_not_recorded_has_no_files(config: TxConfig, database: Database) -> None:
    asked = CopyWeightsRequest(source_path=SOURCE, session_id="s", model_seq_id=5)
    target = copying.target_path("alice", asked, None)
    complete = copying.copy_files(config, SOURCE, target)
    with writing(database) as db:
        db.delete(db.get_one(Checkpoint, ("s:train:0", "weights", "x")))
    with pytest.raises(Refusal, match="there is no checkpoint"), writing(database) as db:
        copying.record_copy(db, "alice", config, asked, target, complete)
    assert not checkpoint_folder(config, target).exists()


def test_copies_of_what_is_public(config: TxConfig, database: Database) -> None:
    with pytest.raises(Refusal, match="there is no checkpoint"):
        copy(config, database, "bob", session_id="t", model_seq_id=0)
    with writing(database) as db:
        db.get_one(Checkpoint, ("s:train:0", "weights", "x")).is_public = True
    assert copy(config, database, "bob", session_id="t", model_seq_id=0) == "tinker://t:train:0/weights/x"
    with pytest.raises(Refusal, match="there is no session"):
        copy(config, database, "bob", session_id="s", model_seq_id=1)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({}, "takes either destination_project_id, or session_id and model_seq_id"),
        ({"session_id": "s"}, "takes either"),
        (
            {"session_id": "s", "model_seq_id": 0, "source_path": "tinker://s:train:1/weights/y"},
            "there is no checkpoint",
        ),
    ],
)
def test_what_cannot_be_copied(config: TxConfig, database: Database, told: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal, match=words):
        copy(config, database, **told)


def test_a_model_that_is_there_is_not_overwritten(config: TxConfig, database: Database) -> None:
    with writing(database) as db:
        db.add(Model(model_id="s:train:7", session_id="s", model_seq_id=7, base_model="m", rank=4, lora={"rank": 4}))
    with pytest.raises(Refusal, match="there is a model s:train:7 already"):
        copy(config, database, session_id="s", model_seq_id=7)


def test_files_that_are_gone(config: TxConfig, database: Database) -> None:
    delete_folder(checkpoint_folder(config, SOURCE))
    with pytest.raises(Refusal, match=r"the files of .* are gone") as refused:
        copy(config, database, destination_project_id="p")
    assert refused.value.status == 404
    assert not list(config.checkpoints_base.rglob(".unfinished-*"))
