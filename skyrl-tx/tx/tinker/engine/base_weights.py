"""Bind a base model's name to its weights: adapters and checkpoints fit no other weights."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine as Database
from sqlmodel import Session, col, select

from tx.models.config import ModelError
from tx.models.files import fingerprint
from tx.tinker.db_models import GONE, BaseWeights, Checkpoint, ClientSession, Model, SessionStatus
from tx.tinker.store.database import writing


def check_weights(database: Database, name: str, folder: Path) -> None:
    """Record and check the fingerprint of a base model's weights.

    Raises:
        ModelError: models were trained on different weights with this name.
    """
    found = fingerprint(folder)
    if found is None:
        return
    with writing(database) as session:
        known = session.get(BaseWeights, name)
        if known is not None and known.fingerprint != found and _is_used(session, name):
            raise ModelError(
                f"{folder} has different weights from those that were served as {name} before, which models and "
                "checkpoints of this server were trained on; use another --served-model-name, or serve the old weights"
            )
        session.merge(BaseWeights(base_model=name, fingerprint=found))


def _is_used(session: Session, name: str) -> bool:
    """Return True if a checkpoint, a living model or a snapshot uses the base model."""
    is_there = col(Model.status).not_in(GONE) | (col(ClientSession.status) == SessionStatus.ACTIVE)
    models = select(Model).join(ClientSession).where(Model.base_model == name, is_there)
    checkpoints = select(Checkpoint).where(Checkpoint.base_model == name)
    return any(session.exec(found.limit(1)).first() for found in (models, checkpoints))
