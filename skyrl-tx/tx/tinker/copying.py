"""A checkpoint copied into a run of its own, which is never trained on."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from sqlmodel import Session

from tx.tinker import store
from tx.tinker.checkpoint_files import TinkerPath, checkpoint_folder, fill_folder, give_name, parse_path
from tx.tinker.config import TxConfig
from tx.tinker.db_models import Checkpoint, Model, ModelStatus, SessionStatus
from tx.tinker.db_models import Session as ClientSession
from tx.tinker.refusal import not_found, refuse
from tx.tinker.wire.requests import CopyWeightsRequest


def copy_files(config: TxConfig, source: str, target: str) -> Path:
    """The files of a checkpoint in a folder that `record_copy` gives its name to. They share what they hold with those
    of the source where the file system can.

    Raises:
        Refusal: they were deleted meanwhile.
    """
    there = checkpoint_folder(config, source)

    def write(folder: Path) -> None:
        shutil.copytree(there, folder, copy_function=_link_or_copy, dirs_exist_ok=True)

    try:
        return fill_folder(checkpoint_folder(config, target), write)
    except (FileNotFoundError, shutil.Error):
        if there.is_dir():
            raise
        not_found(f"the files of {source} are gone")


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def target_path(owner: str, asked: CopyWeightsRequest, idempotency_key: str | None) -> str:
    """Where the copy goes: the same place when the same copy is asked for again."""
    source = parse_path(asked.source_path)
    if asked.session_id is not None and asked.model_seq_id is not None:
        model_id = store.model_id_of(asked.session_id, asked.model_seq_id)
    elif asked.destination_project_id is not None:
        key = uuid.uuid4().hex if idempotency_key is None else f"{owner} {idempotency_key} {asked.source_path}"
        model_id = store.model_id_of(str(uuid.uuid5(uuid.NAMESPACE_URL, key)), 0)
    else:
        refuse("copy_weights takes either destination_project_id, or session_id and model_seq_id")
    return str(TinkerPath(model_id, source.kind, source.name))


def check_copy(db: Session, owner: str, asked: CopyWeightsRequest, target: str) -> bool:
    """Whether there is something left to copy: what is there already is a repetition."""
    store.find_checkpoint(db, asked.source_path, owner)
    if asked.session_id is not None:
        store.active_session(db, asked.session_id, owner)
    path = parse_path(target)
    if db.get(Checkpoint, path) is not None:
        return False
    if db.get(Model, path.model_id) is not None:
        refuse(f"there is a model {path.model_id} already; count model_seq_id up for each new one")
    return True


def record_copy(
    db: Session, owner: str, config: TxConfig, asked: CopyWeightsRequest, target: str, complete: Path
) -> None:
    """A copy has its rows, and its files their name: both or none. Nothing is done if there is one already."""
    source = store.find_checkpoint(db, asked.source_path, owner)
    path = parse_path(target)
    if db.get(Checkpoint, path) is not None:
        return
    session_id, _, number = path.model_id.partition(":train:")
    if db.get(ClientSession, session_id) is None:
        db.add(_session(session_id, owner, asked))
        db.flush()
    db.add(_model(path.model_id, session_id, int(number), source))
    db.add(_checkpoint(path, source, asked))
    db.flush()
    give_name(complete, checkpoint_folder(config, target))


def _session(session_id: str, owner: str, asked: CopyWeightsRequest) -> ClientSession:
    return ClientSession(
        session_id=session_id,
        owner=owner,
        project_id=asked.destination_project_id,
        display_name=f"copy of {asked.source_path}",
        status=SessionStatus.FINISHED,
        end_reason="success",
    )


def _model(model_id: str, session_id: str, number: int, source: Checkpoint) -> Model:
    return Model(
        model_id=model_id,
        session_id=session_id,
        model_seq_id=number,
        base_model=source.base_model,
        rank=source.lora["rank"],
        lora=source.lora,
        status=ModelStatus.UNLOADED,
    )


def _checkpoint(path: TinkerPath, source: Checkpoint, asked: CopyWeightsRequest) -> Checkpoint:
    return Checkpoint(
        model_id=path.model_id,
        kind=path.kind,
        name=path.name,
        base_model=source.base_model,
        lora=source.lora,
        size_bytes=source.size_bytes,
        user_metadata=source.user_metadata,
        expires_at=store.expiry(asked.ttl_seconds),
    )
