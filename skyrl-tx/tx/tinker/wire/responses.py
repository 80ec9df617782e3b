"""JSON response bodies, and the results that the engine writes as JSON. Fields that are None are omitted."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

Category = Literal["user", "server", "unknown"]


class ResponseBody(BaseModel):
    """A JSON response body."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    def to_bytes(self) -> bytes:
        """Serialize to JSON."""
        return self.model_dump_json(exclude_none=True).encode()


class Empty(ResponseBody):
    """An empty response."""


class Promise(ResponseBody):
    """The number of an accepted request."""

    request_id: str


class SamplePromise(Promise):
    """A promise with an id for each sample."""

    sample_sequence_ids: list[str]


class TryAgain(ResponseBody):
    """The result is not available yet."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active", "paused_capacity"] = "active"
    queue_state_reason: str | None = None


class Failure(ResponseBody):
    """The request failed."""

    error: str
    category: Category


class ModelCreated(ResponseBody):
    """Result of `CREATE_MODEL`."""

    model_id: str
    type: Literal["create_model"] = "create_model"


class WeightsLoaded(ResponseBody):
    """Result of `LOAD_WEIGHTS`."""

    model_id: str
    path: str
    type: Literal["load_weights"] = "load_weights"


class OptimStepDone(ResponseBody):
    """Result of `OPTIM_STEP`."""

    metrics: dict[str, float]


class WeightsSaved(ResponseBody):
    """Result of `SAVE_WEIGHTS`, `SAVE_WEIGHTS_EXTERNAL` and, with a name, `SAVE_WEIGHTS_FOR_SAMPLER`."""

    path: str
    size_bytes: int | None = None
    type: Literal["save_weights", "save_weights_for_sampler", "save_weights_external"]


class SnapshotSaved(ResponseBody):
    """Result of `SAVE_WEIGHTS_FOR_SAMPLER` without a name."""

    sampling_session_id: str
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class ModelUnloaded(ResponseBody):
    """Result of `UNLOAD_MODEL`."""

    model_id: str
    type: Literal["unload_model"] = "unload_model"


class ClientConfig(ResponseBody):
    """Settings that the server chooses for clients. All other settings keep the client's defaults."""

    pjwt_auth_enabled: bool = False
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    proto_write_fwdbwd: bool = True
    fwd_via_fwdbwd: bool = True
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False


class DynamicConfig(ResponseBody):
    """Settings that clients refresh regularly."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True
    sample_cancel_max_batch_size: int = 64


class SessionCreated(ResponseBody):
    """A new session, with an optional message for the user."""

    session_id: str
    warning_message: str | None = None


class SamplingSessionCreated(ResponseBody):
    """A new sampling session."""

    sampling_session_id: str


class TelemetryAccepted(ResponseBody):
    """Telemetry was accepted."""

    status: Literal["accepted"] = "accepted"


class Health(ResponseBody):
    """The server is up."""

    status: Literal["ok"] = "ok"


class SupportedModel(ResponseBody):
    """A served model."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


class Capabilities(ResponseBody):
    """The capabilities of the server."""

    supported_models: list[SupportedModel]


class OptimizerConfig(ResponseBody):
    """The only supported optimizer."""

    type: Literal["adamw"] = "adamw"


class ModelData(ResponseBody):
    """A base model."""

    model_name: str
    tokenizer_id: str | None = None


class ModelInfo(ResponseBody):
    """A model under training."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_data: ModelData
    model_name: str
    is_lora: bool
    lora_rank: int | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class SamplerInfo(ResponseBody):
    """A sampling session."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


class WeightsInfo(ResponseBody):
    """The weights of a checkpoint."""

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class DownloadUrls(ResponseBody):
    """A download address for each file, valid until `expires`."""

    urls: dict[str, str]
    expires: datetime


class WeightsCopied(ResponseBody):
    """The path of a copy."""

    tinker_path: str


class TraceExport(ResponseBody):
    """An unavailable trace of a session."""

    status: Literal["failed"] = "failed"
    error: str
