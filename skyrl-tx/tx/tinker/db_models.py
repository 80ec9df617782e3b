"""The tables. They are the queue between the server and the engine, and what both find again after a restart.

A request is accepted when its row is committed. The engine takes the pending rows of a model in the order of their
numbers; the server answers from the rows that are done, as often as it is asked.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, BigInteger, Column, Integer, LargeBinary, UniqueConstraint
from sqlmodel import Field, SQLModel

BigNumber = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up Integer keys only


def now() -> datetime:
    """In UTC, which it says, as all times in the tables do: SQLModel's `UTCDateTime` keeps them."""
    return datetime.now(UTC)


class Kind(StrEnum):
    """Of a request."""

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
    """Of a request."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class SessionStatus(StrEnum):
    """Of a client's session."""

    ACTIVE = "active"
    FINISHED = "finished"
    EXPIRED = "expired"


class ModelStatus(StrEnum):
    """Of a model: it is there once its first request is done."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    UNLOADING = "unloading"  # after what was asked of it before
    UNLOADED = "unloaded"


GONE = (ModelStatus.FAILED, ModelStatus.UNLOADED)
"""Models that will not be there again."""


class CheckpointKind(StrEnum):
    """What a checkpoint is for; also the second segment of its path."""

    TRAINING = "weights"
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"


class Session(SQLModel, table=True):
    """A client from its beginning to its end."""

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
    last_seen_at: datetime = Field(default_factory=now)  # a heartbeat, or anything else


class Model(SQLModel, table=True):
    """A model under training, which is also called a training run. Its id is `<session>:train:<number>`."""

    __tablename__ = "models"

    model_id: str = Field(primary_key=True)
    session_id: str = Field(foreign_key="sessions.session_id", index=True)
    model_seq_id: int
    base_model: str
    rank: int
    lora: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))  # `LoraConfig`, the seed chosen
    user_metadata: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))
    status: ModelStatus = Field(default=ModelStatus.PENDING, index=True)
    created_at: datetime = Field(default_factory=now)
    last_request_at: datetime = Field(default_factory=now)
    restored_until: int = Field(
        default=0, sa_column=Column(BigNumber, nullable=False)
    )  # the last request that its newest restore point has seen
    lost_because: str | None = None  # the engine could not bring it back; what is asked of it waits for one that can


class Request(SQLModel, table=True):
    """Something the engine is to do, and what came of it. The client knows it by its number, as text."""

    __tablename__ = "requests"
    __table_args__ = (
        UniqueConstraint("model_id", "seq_id"),
        UniqueConstraint("sampling_session_id", "sample_seq_id"),
        {"sqlite_autoincrement": True},  # so that no number is given twice, although old rows are deleted
    )

    request_id: int | None = Field(default=None, sa_column=Column(BigNumber, primary_key=True, autoincrement=True))
    kind: Kind
    status: RequestStatus = Field(default=RequestStatus.PENDING, index=True)
    owner: str = "local"
    session_id: str | None = Field(default=None, index=True)
    model_id: str | None = Field(default=None, index=True)
    seq_id: int | None = None  # unique in a model: the same twice is the same request
    sampling_session_id: str | None = Field(default=None, index=True)
    sample_seq_id: int | None = Field(default=None, sa_column=Column(BigNumber))
    payload: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    payload_hash: str  # to tell a repeated request from another with its number
    result: bytes | None = Field(default=None, sa_column=Column(LargeBinary))
    is_result_protobuf: bool = False
    error: str | None = None
    error_category: str | None = None  # "user", "server"
    n_tries: int = 0  # by engines that died meanwhile
    created_at: datetime = Field(default_factory=now)
    completed_at: datetime | None = Field(default=None, index=True)


class SamplingSession(SQLModel, table=True):
    """Weights that a client samples from, which never change: the base model's, a checkpoint's, or a snapshot."""

    __tablename__ = "sampling_sessions"
    __table_args__ = (UniqueConstraint("session_id", "seq_id"),)

    sampling_session_id: str = Field(primary_key=True)
    session_id: str = Field(foreign_key="sessions.session_id", index=True)
    seq_id: int
    base_model: str
    model_path: str | None = None  # of a checkpoint
    model_id: str | None = None  # of a snapshot: whose it is
    created_at: datetime = Field(default_factory=now)


class Checkpoint(SQLModel, table=True):
    """A folder of weights, `tinker://<model>/<kind>/<name>`; the row is written when the folder is complete."""

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
        """As clients know it."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


class BaseWeights(SQLModel, table=True):
    """Which weights the name of a base model stands for."""

    __tablename__ = "base_weights"

    base_model: str = Field(primary_key=True)
    fingerprint: str


class EngineState(SQLModel, table=True):
    """What the engine says of itself; one row."""

    __tablename__ = "engine_state"

    id: int = Field(default=1, primary_key=True)
    base_model: str
    vocab_size: int
    max_context: int
    eos_ids: list[int] = Field(sa_column=Column(JSON, nullable=False))
    can_train_all: bool  # rank 0
    has_tokenizer: bool  # stop strings need one
    started_at: datetime = Field(default_factory=now)
    last_seen_at: datetime = Field(default_factory=now)  # written every second
    status: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))  # for the status page
