"""JSON request bodies. Unknown keys are ignored, since newer clients send more."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, JsonValue

from tx.tinker.types import AdamParams

MAX_INT32 = (1 << 31) - 1
MAX_BETA = 0.9999999
"""Maximum Adam beta: larger values round to 1 in float32."""
MAX_DEPTH = 64
MIN_TTL, MAX_TTL = 3600, 10 * 366 * 24 * 3600


def _check_no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain a null character")
    return value


def _check_storable(value: JsonValue) -> JsonValue:
    """Check that a value can be stored and read back: its text is valid and its nesting limited."""
    left = [(value, 1)]
    while left:
        part, depth = left.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"must not be nested more than {MAX_DEPTH} deep")
        if isinstance(part, str):
            try:
                _check_no_nul(part).encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"contains an unpaired surrogate, {part[error.start]!a}") from error
        elif isinstance(part, dict):
            left += [(child, depth + 1) for pair in part.items() for child in pair]
        elif isinstance(part, list):
            left += [(child, depth + 1) for child in part]
    return value


Json = Annotated[JsonValue, AfterValidator(_check_storable)]
Text = Annotated[str, Len(0, 4096), AfterValidator(_check_no_nul)]
Id = Annotated[str, Len(1, 512), AfterValidator(_check_no_nul)]
Number = Annotated[int, Ge(0), Le(MAX_INT32)]
Token = Annotated[int, Ge(-MAX_INT32 - 1), Le(MAX_INT32)]
Seed = Annotated[int, Ge(-(1 << 63)), Lt(1 << 64)]
Ttl = Annotated[int, Ge(MIN_TTL), Le(MAX_TTL)]
Metadata = Annotated[dict[Text, Json], Len(0, 256)]
TextMetadata = Annotated[dict[Text, Text], Len(0, 256)]


class RequestBody(BaseModel):
    """A JSON request body."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class CreateSessionRequest(RequestBody):
    """The first call of a client."""

    tags: Annotated[list[Text], Len(0, 256)] = []
    user_metadata: Metadata | None = None
    sdk_version: Text | None = None
    project_id: Text | None = None
    display_name: Text | None = None


class SessionHeartbeatRequest(RequestBody):
    """A heartbeat, sent every ten seconds."""

    session_id: Id


class FinishReason(RequestBody):
    """The reason why a session ended."""

    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(RequestBody):
    """The last call of a client."""

    reason: FinishReason
    detail: Text | None = None


class LoraSettings(RequestBody):
    """The matrices and rank of an adapter."""

    rank: Number = 32
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerSettings(RequestBody):
    """The type of an optimizer."""

    type: Text = "adamw"


class CreateModelRequest(RequestBody):
    """A request to create a model. Payload of `CREATE_MODEL`, with the model's id and the chosen seed."""

    session_id: Id
    model_seq_id: Number
    base_model: Text
    lora_config: LoraSettings | None = None
    optimizer_config: OptimizerSettings = OptimizerSettings()
    user_metadata: Metadata | None = None
    model_id: str = ""  # set by the server


class LoadWeightsRequest(RequestBody):
    """A request to load weights into a new or just created model. Payload of `LOAD_WEIGHTS`, with the model's id."""

    path: Text
    optimizer: bool
    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: Text | None = None
    optimizer_config: OptimizerSettings | None = None
    user_metadata: Metadata | None = None
    weights_access_token: Text | None = None


class ModelRequest(RequestBody):
    """A request that names a model: `get_info`, `unload_model`. Payload of `UNLOAD_MODEL`."""

    model_id: Id


class AdamSettings(RequestBody):
    """Settings of an AdamW step."""

    learning_rate: Annotated[float, Ge(0)] = 1e-4
    beta1: Annotated[float, Ge(0), Le(MAX_BETA)] = 0.9
    beta2: Annotated[float, Ge(0), Le(MAX_BETA)] = 0.95
    eps: Annotated[float, Ge(0)] = 1e-12
    weight_decay: Annotated[float, Ge(0)] = 0.0
    grad_clip_norm: Annotated[float, Ge(0)] = 0.0


class OptimStepRequest(RequestBody):
    """A request for an optimizer step. Payload of `OPTIM_STEP`."""

    model_id: Id
    seq_id: Number | None = None
    adam_params: AdamSettings | None = Field(default=None, validation_alias=AliasChoices("adam_params", "optim_params"))
    optimizer_params: OptimizerSettings | None = None  # for optimizers other than AdamW

    def adam(self) -> AdamParams:
        """Return the settings for the backend."""
        return AdamParams(**(self.adam_params or AdamSettings()).model_dump())


class SaveWeightsRequest(RequestBody):
    """A request to save a training checkpoint. Payload of `SAVE_WEIGHTS`, with a name in `path`."""

    model_id: Id
    path: Text | None = None
    seq_id: Number | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: TextMetadata | None = None


class SaveWeightsForSamplerRequest(RequestBody):
    """A request to save weights to sample from. Payload of `SAVE_WEIGHTS_FOR_SAMPLER`, with `path` or
    `sampling_session_id` set.
    """

    model_id: Id
    path: Text | None = None
    sampling_session_seq_id: Number | None = None
    kind: Text = "snapshot"
    seq_id: Number | None = None
    ttl_seconds: Ttl | None = None
    user_metadata: TextMetadata | None = None
    sampling_session_id: str | None = None  # set by the server


class SaveWeightsExternalRequest(RequestBody):
    """A request to save weights for other programs. Payload of `SAVE_WEIGHTS_EXTERNAL`."""

    model_id: Id
    path: Text
    seq_id: Number | None = None
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: list[Text] | None = None


class CreateSamplingSessionRequest(RequestBody):
    """A request for a sampling session with the base model or a checkpoint."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: Text | None = None
    model_path: Text | None = None


class Chunk(RequestBody):
    """A part of an input. Older clients omit its type."""

    type: Text | None = None
    tokens: list[Token] | None = None
    data: str | None = None  # an image, in base64
    format: Text | None = None
    expected_tokens: Token | None = None
    override_dimensions: dict[Text, Json] | None = None  # not supported


class ModelInput(RequestBody):
    """A sequence: the tokens of all chunks, concatenated. An image is a chunk with `data`."""

    chunks: list[Chunk]


class SamplingSettings(RequestBody):
    """Sampling settings."""

    max_tokens: Annotated[int, Ge(1), Le(MAX_INT32)] | None = None
    seed: Seed | None = None
    stop: Text | list[Token] | list[Text] | None = None
    temperature: Annotated[float, Ge(0)] = 1.0
    top_k: Annotated[int, Ge(-1), Le(MAX_INT32)] = -1
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0


class AsampleRequest(RequestBody):
    """A request for samples after a prompt."""

    prompt: ModelInput
    sampling_params: SamplingSettings
    num_samples: Annotated[int, Ge(1), Le(4096)] = 1
    base_model: Text | None = None
    model_path: Text | None = None
    sampling_session_id: Id | None = None
    seq_id: Annotated[int, Ge(0), Lt(1 << 62)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Number = 0
    topk_sample_logprobs: Number = 0
    target_prompt_logprobs: Json | None = None
    prompt_alt_tokens_k: Number = 0
    prompt_logprobs_last_n: Number | None = None
    record_stability_info: bool | None = None


class Tensor(RequestBody):
    """A tensor in the JSON of older clients."""

    model_config = ConfigDict(allow_inf_nan=True)

    data: list[int] | list[float]
    dtype: Literal["float32", "int64"]
    shape: Annotated[list[int], Len(0, 8)] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class JsonDatum(RequestBody):
    """A datum in the JSON of older clients."""

    model_input: ModelInput
    loss_fn_inputs: dict[Text, Tensor]


class ForwardBackwardInput(RequestBody):
    """Data and their loss."""

    data: list[JsonDatum]
    loss_fn: Text
    loss_fn_config: dict[Text, float | str] | None = None


class ForwardBackwardRequest(RequestBody):
    """A pass of older clients, and the body of `forward`."""

    model_id: Id
    seq_id: Number | None = None
    forward_backward_input: ForwardBackwardInput = Field(
        validation_alias=AliasChoices("forward_backward_input", "forward_input")
    )


class RetrieveFutureRequest(RequestBody):
    """A poll for the result of a request."""

    request_id: Id
    allow_metadata_only: bool = False


class CancelFutureRequest(RequestBody):
    """A request to cancel another request."""

    request_id: Id


class WeightsInfoRequest(RequestBody):
    """A request for the description of a checkpoint's weights."""

    tinker_path: Text


class SetTtlRequest(RequestBody):
    """A request to set a checkpoint's lifetime. null removes the limit."""

    ttl_seconds: Ttl | None


class CopyWeightsRequest(RequestBody):
    """A request to copy a checkpoint."""

    source_path: Text
    session_id: Id | None = None
    model_seq_id: Number | None = None
    destination_project_id: Text | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: Text | None = None


class AssignProjectRequest(RequestBody):
    """A request to assign a session to a project."""

    project_id: Annotated[Text, Len(1)]


class TelemetryRequest(RequestBody):
    """A client's telemetry. It is discarded."""

    events: list[Any] = []
