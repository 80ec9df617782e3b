"""A name of a base model stands for the same weights: adapters and checkpoints fit no others."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine as Database
from sqlmodel import Session, col, select

from tx.models.config import ModelError
from tx.models.files import fingerprint
from tx.tinker.database import writing
from tx.tinker.db_models import BaseWeights, Checkpoint, Model


def check_weights(database: Database, name: str, folder: Path) -> None:
    """Note which weights a base model has.

    Raises:
        ModelError: something was trained on others of its name.
    """
    found = fingerprint(folder)
    with writing(database) as session:
        known = session.get(BaseWeights, name)
        if known is not None and known.fingerprint != found and _is_used(session, name):
            raise ModelError(
                f"{folder} has other weights than what was served as {name} before, on which models and checkpoints of "
                "this server were trained; give it a --served-model-name of its own, or serve the weights from before"
            )
        session.merge(BaseWeights(base_model=name, fingerprint=found))


def _is_used(session: Session, name: str) -> bool:
    models, checkpoints = (select(table).where(col(table.base_model) == name) for table in (Model, Checkpoint))
    return any(session.exec(found.limit(1)).first() for found in (models, checkpoints))
