"""The tables of the first release."""

from datetime import datetime

import sqlalchemy as sa
from alembic import op
from sqlmodel import UTCDateTime
from sqlmodel.sql.sqltypes import AutoString

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
KINDS = (
    "CREATE_MODEL LOAD_WEIGHTS FORWARD_BACKWARD OPTIM_STEP SAVE_WEIGHTS SAVE_WEIGHTS_FOR_SAMPLER "
    "SAVE_WEIGHTS_EXTERNAL UNLOAD_MODEL SAMPLE"
)


def _text(name: str, *, optional: bool = False, key: bool = False) -> sa.Column[str]:
    return sa.Column(name, AutoString(), nullable=optional, primary_key=key)


def _time(name: str, *, optional: bool = False) -> sa.Column[datetime]:
    return sa.Column(name, UTCDateTime(), nullable=optional)


def _json(name: str, *, optional: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.JSON(), nullable=optional)


def _number(name: str, *, optional: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.Integer(), nullable=optional)


def _big(name: str, *, optional: bool = False) -> sa.Column[int]:
    return sa.Column(name, BIG_NUMBER, nullable=optional)


def _choice(name: str, choices: str, kind: str, *, key: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Enum(*choices.split(), name=kind), nullable=False, primary_key=key)


def upgrade() -> None:
    """Create the tables."""
    _sessions()
    _models()
    _requests()
    _sampling_sessions()
    _checkpoints()
    _engine_state()


def _sessions() -> None:
    op.create_table(
        "sessions",
        _text("session_id", key=True),
        _json("tags"),
        _json("user_metadata", optional=True),
        _text("sdk_version", optional=True),
        _text("project_id", optional=True),
        _text("display_name", optional=True),
        _text("owner"),
        _choice("status", "ACTIVE FINISHED EXPIRED", "sessionstatus"),
        _text("end_reason", optional=True),
        _time("created_at"),
        _time("last_seen_at"),
    )
    op.create_index("ix_sessions_status", "sessions", ["status"])


def _models() -> None:
    op.create_table(
        "models",
        _text("model_id", key=True),
        sa.Column("session_id", AutoString(), sa.ForeignKey("sessions.session_id"), nullable=False),
        _number("model_seq_id"),
        _text("base_model"),
        _number("rank"),
        _json("lora"),
        _json("user_metadata", optional=True),
        _choice("status", "PENDING READY FAILED UNLOADING UNLOADED", "modelstatus"),
        _time("created_at"),
        _time("last_request_at"),
        _big("restored_until"),
    )
    op.create_index("ix_models_session_id", "models", ["session_id"])
    op.create_index("ix_models_status", "models", ["status"])


def _requests() -> None:
    op.create_table(
        "requests",
        sa.Column("request_id", BIG_NUMBER, primary_key=True, autoincrement=True),
        _choice("kind", KINDS, "kind"),
        _choice("status", "PENDING DONE FAILED CANCELLED", "requeststatus"),
        _text("owner"),
        _text("session_id", optional=True),
        _text("model_id", optional=True),
        _number("seq_id", optional=True),
        _text("sampling_session_id", optional=True),
        _big("sample_seq_id", optional=True),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        _text("payload_hash"),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.Column("is_result_protobuf", sa.Boolean(), nullable=False),
        _text("error", optional=True),
        _text("error_category", optional=True),
        _number("n_tries"),
        _time("created_at"),
        _time("completed_at", optional=True),
        sa.UniqueConstraint("model_id", "seq_id"),
        sa.UniqueConstraint("sampling_session_id", "sample_seq_id"),
        sqlite_autoincrement=True,
    )
    for column in ("status", "session_id", "model_id", "sampling_session_id", "completed_at"):
        op.create_index(f"ix_requests_{column}", "requests", [column])


def _sampling_sessions() -> None:
    op.create_table(
        "sampling_sessions",
        _text("sampling_session_id", key=True),
        sa.Column("session_id", AutoString(), sa.ForeignKey("sessions.session_id"), nullable=False),
        _number("seq_id"),
        _text("base_model"),
        _text("model_path", optional=True),
        _text("model_id", optional=True),
        _time("created_at"),
        sa.UniqueConstraint("session_id", "seq_id"),
    )
    op.create_index("ix_sampling_sessions_session_id", "sampling_sessions", ["session_id"])


def _checkpoints() -> None:
    op.create_table(
        "checkpoints",
        _text("model_id", key=True),
        _choice("kind", "TRAINING SAMPLER EXTERNAL", "checkpointkind", key=True),
        _text("name", key=True),
        _text("base_model"),
        _json("lora"),
        _big("size_bytes"),
        sa.Column("is_public", sa.Boolean(), nullable=False),
        _json("user_metadata", optional=True),
        _time("created_at"),
        _time("expires_at", optional=True),
    )
    op.create_index("ix_checkpoints_expires_at", "checkpoints", ["expires_at"])


def _engine_state() -> None:
    op.create_table(
        "engine_state",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        _text("base_model"),
        _number("vocab_size"),
        _number("max_context"),
        _json("eos_ids"),
        sa.Column("can_train_all", sa.Boolean(), nullable=False),
        sa.Column("has_tokenizer", sa.Boolean(), nullable=False),
        _time("started_at"),
        _time("last_seen_at"),
        _json("status"),
    )


def downgrade() -> None:
    """Drop the tables."""
    for table in ("engine_state", "checkpoints", "sampling_sessions", "requests", "models", "sessions"):
        op.drop_table(table)
