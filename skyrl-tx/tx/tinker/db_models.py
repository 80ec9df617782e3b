"""Database tables: the queue between server and engine, and the state that both recover after a restart.

A request is accepted when its row is committed. The engine takes a model's pending rows in the order of their numbers,
and the server answers from finished rows, as often as clients ask.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, BigInteger, Column, Integer, LargeBinary, UniqueConstraint
from sqlmodel import Field, SQLModel

BigNumber = BigInteger().with_variant(Integer, "sqlite")  # SQLite autoincrements Integer keys only


def now() -> datetime:
    """Return the current time in UTC. All times in the tables have a time zone (SQLModel's `UTCDateTime`)."""
    return datetime.now(UTC)


class Kind(StrEnum):
    """Kind of a request."""

    CREATE_MODEL = "create_model"
    LOAD_WEIGHTS = "load_weights"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_WEIGHTS_EXTERNAL = "save_weights_external"
    UNLOAD_MODEL = "unload_model"
    SAMPLE = "sample"


class RequestStatus(StrEnum):
    """Status of a request."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class SessionStatus(StrEnum):
    """Status of a client's session."""

    ACTIVE = "active"
    FINISHED = "finished"
    EXPIRED = "expired"


class ModelStatus(StrEnum):
    """Status of a model. It is ready once its first request is done."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    UNLOADING = "unloading"  # after its earlier requests
    UNLOADED = "unloaded"


GONE = (ModelStatus.FAILED, ModelStatus.UNLOADED)
"""Statuses of models that will not come back."""


class CheckpointKind(StrEnum):
    """Kind of a checkpoint, and the second segment of its path."""

    TRAINING = "weights"
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"


class ClientSession(SQLModel, table=True):
    """The session of a client."""

    __tablename__ = "sessions"

    session_id: str = Field(primary_key=True)
    tags: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    user_metadata: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None
    owner: str = "local"
    status: SessionStatus = Field(default=SessionStatus.ACTIVE, index=True)
    end_reason: str | None = None
    created_at: datetime = Field(default_factory=now)
    last_seen_at: datetime = Field(default_factory=now)  # by a heartbeat or any other request


class Model(SQLModel, table=True):
    """A model being trained, which the API calls a training run. Its id is `<session>:train:<number>`."""

    __tablename__ = "models"

    model_id: str = Field(primary_key=True)
    session_id: str = Field(foreign_key="sessions.session_id", index=True)
    model_seq_id: int
    base_model: str
    rank: int
    lora: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))  # `AdapterConfig`, with the chosen seed
    user_metadata: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))
    status: ModelStatus = Field(default=ModelStatus.PENDING, index=True)
    created_at: datetime = Field(default_factory=now)
    last_request_at: datetime = Field(default_factory=now)
    # The last request that its latest restore point includes, or 0 without a restore point.
    restored_until: int = Field(default=0, sa_column=Column(BigNumber, nullable=False))
    lost_because: str | None = None  # why the engine could not restore it. Its requests wait for an engine that can.


class TxRequest(SQLModel, table=True):
    """A request to the engine and its result. Clients know its number, as text."""

    __tablename__ = "requests"
    __table_args__ = (
        UniqueConstraint("model_id", "seq_id"),
        UniqueConstraint("sampling_session_id", "sample_seq_id"),
        {"sqlite_autoincrement": True},  # numbers of deleted rows are never reused
    )

    request_id: int | None = Field(default=None, sa_column=Column(BigNumber, primary_key=True, autoincrement=True))
    kind: Kind
    status: RequestStatus = Field(default=RequestStatus.PENDING, index=True)
    owner: str = "local"
    session_id: str | None = Field(default=None, index=True)
    model_id: str | None = Field(default=None, index=True)
    seq_id: int | None = None  # unique per model: a repeated number is the same request
    sampling_session_id: str | None = Field(default=None, index=True)
    sample_seq_id: int | None = Field(default=None, sa_column=Column(BigNumber))
    payload: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    payload_hash: str  # distinguishes a repeated request from a different one with the same number
    result: bytes | None = Field(default=None, sa_column=Column(LargeBinary))
    is_result_protobuf: bool = False
    error: str | None = None
    error_category: str | None = None  # "user" or "server"
    n_tries: int = 0  # engines that died while it was running
    created_at: datetime = Field(default_factory=now)
    completed_at: datetime | None = Field(default=None, index=True)


class SamplingSession(SQLModel, table=True):
    """Immutable weights that a client samples from: the base model, a checkpoint or a snapshot."""

    __tablename__ = "sampling_sessions"
    __table_args__ = (UniqueConstraint("session_id", "seq_id"),)

    sampling_session_id: str = Field(primary_key=True)
    session_id: str = Field(foreign_key="sessions.session_id", index=True)
    seq_id: int
    base_model: str
    model_path: str | None = None  # for a checkpoint
    model_id: str | None = None  # for a snapshot: its model
    created_at: datetime = Field(default_factory=now)


class Checkpoint(SQLModel, table=True):
    """A folder of weights, `tinker://<model>/<kind>/<name>`. The row is written once the folder is complete."""

    __tablename__ = "checkpoints"

    model_id: str = Field(primary_key=True)
    kind: CheckpointKind = Field(primary_key=True)
    name: str = Field(primary_key=True)
    base_model: str
    lora: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    size_bytes: int = Field(sa_column=Column(BigNumber, nullable=False))
    is_public: bool = False
    user_metadata: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))
    created_at: datetime = Field(default_factory=now)
    expires_at: datetime | None = Field(default=None, index=True)

    @property
    def path(self) -> str:
        """The path that clients use."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


class BaseWeights(SQLModel, table=True):
    """Fingerprint of a base model's weights."""

    __tablename__ = "base_weights"

    base_model: str = Field(primary_key=True)
    fingerprint: str


STALLED = "seconds without progress"
"""Key in the engine's status: how long its loop has been in one computation, not counting compilation."""


class EngineState(SQLModel, table=True):
    """The state that the engine reports. One row."""

    __tablename__ = "engine_state"

    id: int = Field(default=1, primary_key=True)
    base_model: str
    vocab_size: int
    max_context: int
    eos_ids: list[int] = Field(sa_column=Column(JSON, nullable=False))
    can_train_all: bool  # supports rank 0
    has_tokenizer: bool  # required for stop strings
    started_at: datetime = Field(default_factory=now)
    last_seen_at: datetime = Field(default_factory=now)  # updated every second
    status: dict[str, Any] = Field(
        default_factory=dict, sa_column=Column(JSON, nullable=False)
    )  # shown on the status page
