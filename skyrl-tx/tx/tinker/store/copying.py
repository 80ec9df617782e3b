"""Copy a checkpoint into a separate run that is never trained."""

import os
import shutil
import uuid
from pathlib import Path

from sqlmodel import Session

from tx.tinker.config import TxConfig
from tx.tinker.db_models import Checkpoint, ClientSession, Model, ModelStatus, SessionStatus
from tx.tinker.refusal import not_found, refuse
from tx.tinker.store import queries
from tx.tinker.store.checkpoint_files import TinkerPath, checkpoint_folder, fill_folder, parse_path, rename_into_place
from tx.tinker.wire.requests import CopyWeightsRequest


def copy_files(config: TxConfig, source: str, target: str) -> Path:
    """Fill a temporary folder with hard links to a checkpoint's files, or copies where links are not possible.

    `record_copy` renames it into place. Checkpoint files are never modified in place, so links are safe.

    Raises:
        RefusalError: the checkpoint's files no longer exist.
    """
    source_folder = checkpoint_folder(config, source)

    def write(folder: Path) -> None:
        shutil.copytree(source_folder, folder, copy_function=_link_or_copy, dirs_exist_ok=True)

    try:
        return fill_folder(checkpoint_folder(config, target), write)
    except (FileNotFoundError, shutil.Error):
        if source_folder.is_dir():
            raise
        not_found(f"the files of {source} are gone")


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def target_path(owner: str, body: CopyWeightsRequest, idempotency_key: str | None) -> str:
    """Return the copy's path, which is the same for repeated requests."""
    source = parse_path(body.source_path)
    if body.session_id is not None and body.model_seq_id is not None:
        model_id = queries.model_id_of(body.session_id, body.model_seq_id)
    elif body.destination_project_id is not None:
        key = uuid.uuid4().hex if idempotency_key is None else f"{owner} {idempotency_key} {body.source_path}"
        model_id = queries.model_id_of(str(uuid.uuid5(uuid.NAMESPACE_URL, key)), 0)
    else:
        refuse("copy_weights takes either destination_project_id, or session_id and model_seq_id")
    return str(TinkerPath(model_id, source.kind, source.name))


def check_copy(db: Session, owner: str, body: CopyWeightsRequest, target: str) -> bool:
    """Return True if there is anything to copy, False if the request is a repetition."""
    queries.find_checkpoint(db, body.source_path, owner)
    if body.session_id is not None:
        queries.active_session(db, body.session_id, owner)
    path = parse_path(target)
    if db.get(Checkpoint, path) is not None:
        return False
    if db.get(Model, path.model_id) is not None:
        refuse(f"model {path.model_id} already exists; increment model_seq_id for each new one")
    return True


def record_copy(
    db: Session, owner: str, config: TxConfig, body: CopyWeightsRequest, target: str, complete: Path
) -> None:
    """Add the rows of a copy and rename its folder into place: both or neither. Do nothing if the copy exists."""
    source = queries.find_checkpoint(db, body.source_path, owner)
    path = parse_path(target)
    if db.get(Checkpoint, path) is not None:
        return
    session_id, _, number = path.model_id.partition(":train:")
    if db.get(ClientSession, session_id) is None:
        session = ClientSession(session_id=session_id, owner=owner, project_id=body.destination_project_id)
        session.display_name = f"copy of {body.source_path}"
        session.status, session.end_reason = SessionStatus.FINISHED, "success"
        db.add(session)
        db.flush()
    model = Model(
        model_id=path.model_id,
        session_id=session_id,
        model_seq_id=int(number),
        base_model=source.base_model,
        rank=source.lora["rank"],
        lora=source.lora,
        status=ModelStatus.UNLOADED,
    )
    checkpoint = Checkpoint(
        model_id=path.model_id,
        kind=path.kind,
        name=path.name,
        base_model=source.base_model,
        lora=source.lora,
        size_bytes=source.size_bytes,
        user_metadata=source.user_metadata,
        expires_at=queries.expiry(body.ttl_seconds),
    )
    db.add_all((model, checkpoint))
    db.flush()
    rename_into_place(complete, checkpoint_folder(config, target))
