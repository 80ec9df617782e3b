"""A name of a base model stands for the same weights: adapters and checkpoints fit no others."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine as Database
from sqlmodel import Session, col, select

from tx.models.config import ModelError
from tx.models.files import fingerprint
from tx.tinker.database import writing
from tx.tinker.db_models import GONE, BaseWeights, Checkpoint, Model, SessionStatus
from tx.tinker.db_models import Session as ClientSession


def check_weights(database: Database, name: str, folder: Path) -> None:
    """Note which weights a base model has.

    Raises:
        ModelError: something was trained on others of its name.
    """
    found = fingerprint(folder)
    if found is None:
        return
    with writing(database) as session:
        known = session.get(BaseWeights, name)
        if known is not None and known.fingerprint != found and _is_used(session, name):
            raise ModelError(
                f"{folder} has other weights than what was served as {name} before, on which models and checkpoints of "
                "this server were trained; give it a --served-model-name of its own, or serve the weights from before"
            )
        session.merge(BaseWeights(base_model=name, fingerprint=found))


def _is_used(session: Session, name: str) -> bool:
    """By a checkpoint, or a model that is there or whose snapshots are."""
    is_there = col(Model.status).not_in(GONE) | (col(ClientSession.status) == SessionStatus.ACTIVE)
    models = select(Model).join(ClientSession).where(Model.base_model == name, is_there)
    checkpoints = select(Checkpoint).where(Checkpoint.base_model == name)
    return any(session.exec(found.limit(1)).first() for found in (models, checkpoints))
