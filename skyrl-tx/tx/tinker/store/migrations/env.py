"""The alembic environment. It uses the connection and transaction of `database`.

After a change to `db_models`, add a file to `versions/`. A test compares the migrated tables with the models.
"""

import logging

from alembic import context
from sqlmodel import SQLModel

from tx.tinker import db_models  # noqa: F401  (fills the metadata)

logging.getLogger("alembic.runtime.migration").setLevel(logging.WARNING)  # nothing to report on most starts

context.configure(
    connection=context.config.attributes["connection"], target_metadata=SQLModel.metadata, render_as_batch=True
)
context.run_migrations()
