"""Lists of runs, checkpoints and sessions: what is answered, and how sessions are searched for."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from annotated_types import Ge, Le, Len
from pydantic import Field

from tx.tinker.wire.requests import Asked, Id, Text, TextMetadata
from tx.tinker.wire.responses import Answer


class Cursor(Answer):
    """Which part of a list this is."""

    offset: int
    limit: int
    total_count: int


class CheckpointInfo(Answer):
    """A checkpoint; its id has its kind, as in `weights/0001`."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class CheckpointList(Answer):
    """Checkpoints, the newest first."""

    checkpoints: list[CheckpointInfo]
    cursor: Cursor | None = None


class TrainingRun(Answer):
    """A model, and what there is of it."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: CheckpointInfo | None = None
    last_sampler_checkpoint: CheckpointInfo | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunList(Answer):
    """Models, the one used last first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class SessionList(Answer):
    """Ids, the newest first."""

    sessions: list[str]


class SessionInfo(Answer):
    """What belongs to a session."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class FinishedBy(Answer):
    """A client's reason."""

    type: Literal["success", "errored", "interrupted"]


class ShownStatus(Answer):
    """Of a session; `failed` and what it needs is never used here."""

    type: Literal["active", "client_finished", "cancelled"]
    reason: FinishedBy | None = None
    detail: str | None = None


class SessionSummary(Answer):
    """A session that was found."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: ShownStatus
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SearchCursor(Answer):
    """Where the next page begins."""

    last_created_at: datetime
    last_session_id: str


class SessionsFound(Answer):
    """A page of them."""

    sessions: list[SessionSummary]
    next_cursor: SearchCursor | None = None


class SearchedStatus(Asked):
    """Sessions of a status."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = None


class AskedCursor(Asked):
    """Where a page ended."""

    last_created_at: datetime
    last_session_id: Id


class SearchSessionsRequest(Asked):
    """Sessions, the newest first."""

    session_id: Text | None = None
    project_ids: Annotated[list[Text], Len(0, 256)] | None = None
    user_metadata: TextMetadata = Field(default_factory=dict)
    display_name: Text | None = None
    statuses: Annotated[list[SearchedStatus], Len(1, 16)] | None = None
    limit: Annotated[int, Ge(1), Le(200)] = 50
    cursor: AskedCursor | None = None
