"""Messages about runs, checkpoints and sessions, and the search for sessions."""

from datetime import datetime
from typing import Annotated, Literal

from annotated_types import Ge, Le, Len
from pydantic import Field

from tx.tinker.wire.requests import Id, RequestBody, Text, TextMetadata
from tx.tinker.wire.responses import ResponseBody


class Cursor(ResponseBody):
    """The position of a page in its list."""

    offset: int
    limit: int
    total_count: int


class CheckpointInfo(ResponseBody):
    """A checkpoint. Its id includes the kind, e.g. `weights/0001`."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class CheckpointList(ResponseBody):
    """Checkpoints, the newest first."""

    checkpoints: list[CheckpointInfo]
    cursor: Cursor | None = None


class TrainingRun(ResponseBody):
    """A training run and its last checkpoints."""

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


class TrainingRunList(ResponseBody):
    """Training runs, most recently used first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class SessionList(ResponseBody):
    """Session ids, newest first."""

    sessions: list[str]


class SessionInfo(ResponseBody):
    """A session with its runs and samplers."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class FinishInfo(ResponseBody):
    """The client's reason for finishing."""

    type: Literal["success", "errored", "interrupted"]


class StatusInfo(ResponseBody):
    """Status of a session. `failed` and its fields are never used here."""

    type: Literal["active", "client_finished", "cancelled"]
    reason: FinishInfo | None = None
    detail: str | None = None


class SessionSummary(ResponseBody):
    """A session in search results."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: StatusInfo
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SearchCursor(ResponseBody):
    """The start of the next page."""

    last_created_at: datetime
    last_session_id: str


class SessionsFound(ResponseBody):
    """A page of search results."""

    sessions: list[SessionSummary]
    next_cursor: SearchCursor | None = None


class StatusFilter(RequestBody):
    """A status to search for."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = None


class PreviousCursor(RequestBody):
    """The end of the previous page."""

    last_created_at: datetime
    last_session_id: Id


class SearchSessionsRequest(RequestBody):
    """A search for sessions."""

    session_id: Text | None = None
    project_ids: Annotated[list[Text], Len(0, 256)] | None = None
    user_metadata: TextMetadata = Field(default_factory=dict)
    display_name: Text | None = None
    statuses: Annotated[list[StatusFilter], Len(1, 16)] | None = None
    limit: Annotated[int, Ge(1), Le(200)] = 50
    cursor: PreviousCursor | None = None
