"""What the server answers in JSON, and the results that the engine writes in JSON. What is None is left out."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

Category = Literal["user", "server", "unknown"]


class Answer(BaseModel):
    """The body of a reply."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    def to_bytes(self) -> bytes:
        """As JSON."""
        return self.model_dump_json(exclude_none=True).encode()


class Empty(Answer):
    """Done, and nothing to say."""


class Promise(Answer):
    """A request that was accepted."""

    request_id: str


class SamplePromise(Promise):
    """With a name for each sample to come."""

    sample_sequence_ids: list[str]


class TryAgain(Answer):
    """The result is not there yet."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active", "paused_capacity"] = "active"
    queue_state_reason: str | None = None


class Failure(Answer):
    """The result is an error."""

    error: str
    category: Category


class ModelCreated(Answer):
    """Result of `CREATE_MODEL`."""

    model_id: str
    type: Literal["create_model"] = "create_model"


class WeightsLoaded(Answer):
    """Result of `LOAD_WEIGHTS`."""

    model_id: str
    path: str
    type: Literal["load_weights"] = "load_weights"


class Stepped(Answer):
    """Result of `OPTIM_STEP`."""

    metrics: dict[str, float]


class WeightsSaved(Answer):
    """Result of `SAVE_WEIGHTS`, `SAVE_WEIGHTS_EXTERNAL` and, with a name, `SAVE_WEIGHTS_FOR_SAMPLER`."""

    path: str
    size_bytes: int | None = None
    type: Literal["save_weights", "save_weights_for_sampler", "save_weights_external"]


class SnapshotSaved(Answer):
    """Result of `SAVE_WEIGHTS_FOR_SAMPLER` without a name."""

    sampling_session_id: str
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class ModelUnloaded(Answer):
    """Result of `UNLOAD_MODEL`."""

    model_id: str
    type: Literal["unload_model"] = "unload_model"


class ClientConfig(Answer):
    """What the server chooses for clients; what is not here is at the client's default."""

    pjwt_auth_enabled: bool = False
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    proto_write_fwdbwd: bool = True
    fwd_via_fwdbwd: bool = True
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False


class DynamicConfig(Answer):
    """The same, asked again and again."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True
    sample_cancel_max_batch_size: int = 64


class SessionCreated(Answer):
    """With words for the user, if there are any."""

    session_id: str
    warning_message: str | None = None


class SamplingSessionCreated(Answer):
    """To sample from."""

    sampling_session_id: str


class Accepted(Answer):
    """Telemetry was heard."""

    status: Literal["accepted"] = "accepted"


class Healthy(Answer):
    """The server is up."""

    status: Literal["ok"] = "ok"


class SupportedModel(Answer):
    """What is served."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


class Capabilities(Answer):
    """All of it."""

    supported_models: list[SupportedModel]


class OptimizerConfig(Answer):
    """The one there is."""

    type: Literal["adamw"] = "adamw"


class ModelData(Answer):
    """Of a base model."""

    model_name: str
    tokenizer_id: str | None = None


class ModelInfo(Answer):
    """Of a model under training."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_data: ModelData
    model_name: str
    is_lora: bool
    lora_rank: int | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class SamplerInfo(Answer):
    """Of a sampling session."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


class WeightsDescribed(Answer):
    """What a checkpoint is of."""

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class DownloadUrls(Answer):
    """A plain address for each file, good until `expires`."""

    urls: dict[str, str]
    expires: datetime


class WeightsCopied(Answer):
    """Where to."""

    tinker_path: str


class TraceExport(Answer):
    """A trace of a session, which this server does not make."""

    status: Literal["failed"] = "failed"
    error: str
