"""How alembic runs: on the connection that `database` has opened, and in its transaction.

After a change of `db_models`, write a new file in `versions/`; a test compares what they make with the models.
"""

from __future__ import annotations

import logging

from alembic import context
from sqlmodel import SQLModel

from tx.tinker import db_models  # noqa: F401  (fills the metadata)

logging.getLogger("alembic.runtime.migration").setLevel(logging.WARNING)  # nothing to say, most of the time

context.configure(
    connection=context.config.attributes["connection"], target_metadata=SQLModel.metadata, render_as_batch=True
)
context.run_migrations()
