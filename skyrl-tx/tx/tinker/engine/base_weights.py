"""A name of a base model stands for the same weights for ever: adapters and checkpoints fit no others."""

from __future__ import annotations

from sqlalchemy import Engine as Database

from tx.models.fingerprint import fingerprint
from tx.tinker.backends.base import BaseModel
from tx.tinker.database import writing
from tx.tinker.db_models import BaseWeights


def check_weights(database: Database, base: BaseModel) -> None:
    """Note which weights a base model has.

    Raises:
        ValueError: this server has served others by its name.
    """
    found = fingerprint(base.folder)
    with writing(database) as session:
        known = session.get(BaseWeights, base.name)
        if known is None:
            session.add(BaseWeights(base_model=base.name, fingerprint=found))
        elif known.fingerprint != found:
            raise ValueError(
                f"{base.folder} has other weights than what was served as {base.name} before, which is what the "
                "models and checkpoints here were trained on; give it a --served-model-name of its own, or serve the "
                "weights from before"
            )
