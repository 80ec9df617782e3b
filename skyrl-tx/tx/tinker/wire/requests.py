"""What clients ask in JSON. Keys that are not known are ignored, since newer clients have more of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, JsonValue

from tx.tinker.types import AdamParams

LARGEST_INT32 = (1 << 31) - 1
LARGEST_BETA = 0.9999999
"""A larger one is 1 in float32."""
DEEPEST = 64
SHORTEST_TTL, LONGEST_TTL = 3600, 10 * 366 * 24 * 3600


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not hold a null character")
    return value


def _storable(value: JsonValue) -> JsonValue:
    """It can be written down and read again: no text that is none, and not deeper than parsers go."""
    left = [(value, 1)]
    while left:
        one, depth = left.pop()
        if depth > DEEPEST:
            raise ValueError(f"must not be nested more than {DEEPEST} deep")
        if isinstance(one, str):
            _writable(_without_nul(one))
        elif isinstance(one, dict):
            left += [(part, depth + 1) for pair in one.items() for part in pair]
        elif isinstance(one, list):
            left += [(part, depth + 1) for part in one]
    return value


def _writable(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds half of a surrogate pair, {value[error.start]!a}") from error


Json = Annotated[JsonValue, AfterValidator(_storable)]
Text = Annotated[str, Len(0, 4096), AfterValidator(_without_nul)]
Id = Annotated[str, Len(1, 512), AfterValidator(_without_nul)]
Number = Annotated[int, Ge(0), Le(LARGEST_INT32)]
Token = Annotated[int, Ge(-LARGEST_INT32 - 1), Le(LARGEST_INT32)]
Seed = Annotated[int, Ge(-(1 << 63)), Lt(1 << 64)]
Ttl = Annotated[int, Ge(SHORTEST_TTL), Le(LONGEST_TTL)]
Metadata = Annotated[dict[Text, Json], Len(0, 256)]
TextMetadata = Annotated[dict[Text, Text], Len(0, 256)]


class Asked(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class CreateSessionRequest(Asked):
    """The first call of a client."""

    tags: Annotated[list[Text], Len(0, 256)] = []
    user_metadata: Metadata | None = None
    sdk_version: Text | None = None
    project_id: Text | None = None
    display_name: Text | None = None


class SessionHeartbeatRequest(Asked):
    """Every ten seconds."""

    session_id: Id


class FinishReason(Asked):
    """How a session ended."""

    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(Asked):
    """The last call of a client."""

    reason: FinishReason
    detail: Text | None = None


class Lora(Asked):
    """What an adapter covers."""

    rank: Number = 32
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Asked):
    """Which one."""

    type: Text = "adamw"


class CreateModelRequest(Asked):
    """A new model under training. Payload of `CREATE_MODEL`, with its id and the seed chosen."""

    session_id: Id
    model_seq_id: Number
    base_model: Text
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()
    user_metadata: Metadata | None = None
    model_id: str = ""  # of the server's making


class LoadWeightsRequest(Asked):
    """Weights into a new model, or into one that was created just before. Payload of `LOAD_WEIGHTS`, with the id."""

    path: Text
    optimizer: bool
    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: Text | None = None
    optimizer_config: Optimizer | None = None
    user_metadata: Metadata | None = None
    weights_access_token: Text | None = None


class ModelRequest(Asked):
    """A call that names a model and nothing else: `get_info`, `unload_model`; payload of `UNLOAD_MODEL`."""

    model_id: Id


class Adam(Asked):
    """See `AdamParams`."""

    learning_rate: Annotated[float, Ge(0)] = 1e-4
    beta1: Annotated[float, Ge(0), Le(LARGEST_BETA)] = 0.9
    beta2: Annotated[float, Ge(0), Le(LARGEST_BETA)] = 0.95
    eps: Annotated[float, Ge(0)] = 1e-12
    weight_decay: Annotated[float, Ge(0)] = 0.0
    grad_clip_norm: Annotated[float, Ge(0)] = 0.0


class OptimStepRequest(Asked):
    """One step of the optimizer. Payload of `OPTIM_STEP`."""

    model_id: Id
    seq_id: Number | None = None
    adam_params: Adam | None = Field(default=None, validation_alias=AliasChoices("adam_params", "optim_params"))
    optimizer_params: Optimizer | None = None  # of another optimizer

    def adam(self) -> AdamParams:
        """As backends take it."""
        return AdamParams(**(self.adam_params or Adam()).model_dump())


class SaveWeightsRequest(Asked):
    """A checkpoint to go on from. Payload of `SAVE_WEIGHTS`, with a name in `path`."""

    model_id: Id
    path: Text | None = None
    seq_id: Number | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: TextMetadata | None = None


class SaveWeightsForSamplerRequest(Asked):
    """Weights to sample from. Payload of `SAVE_WEIGHTS_FOR_SAMPLER`, with a name in `path` or `sampling_session_id`."""

    model_id: Id
    path: Text | None = None
    sampling_session_seq_id: Number | None = None
    kind: Text = "snapshot"
    seq_id: Number | None = None
    ttl_seconds: Ttl | None = None
    user_metadata: TextMetadata | None = None
    sampling_session_id: str | None = None  # of the server's making


class SaveWeightsExternalRequest(Asked):
    """Weights for other programs. Payload of `SAVE_WEIGHTS_EXTERNAL`."""

    model_id: Id
    path: Text
    seq_id: Number | None = None
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: list[Text] | None = None


class CreateSamplingSessionRequest(Asked):
    """Weights to sample from, by name."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: Text | None = None
    model_path: Text | None = None


class Chunk(Asked):
    """Of an input; older clients leave out its type."""

    type: Text | None = None
    tokens: list[Token] | None = None


class ModelInput(Asked):
    """The tokens of all its chunks, one after the other."""

    chunks: list[Chunk]


class Sampling(Asked):
    """How to sample."""

    max_tokens: Annotated[int, Ge(1), Le(LARGEST_INT32)] | None = None
    seed: Seed | None = None
    stop: Text | list[Token] | list[Text] | None = None
    temperature: Annotated[float, Ge(0)] = 1.0
    top_k: Annotated[int, Ge(-1), Le(LARGEST_INT32)] = -1
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0


class SampleRequest(Asked):
    """Samples after a prompt."""

    prompt: ModelInput
    sampling_params: Sampling
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


class Tensor(Asked):
    """A tensor of older clients."""

    model_config = ConfigDict(allow_inf_nan=True)

    data: list[int] | list[float]
    dtype: Literal["float32", "int64"]
    shape: Annotated[list[int], Len(0, 8)] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class JsonDatum(Asked):
    """A datum of older clients."""

    model_input: ModelInput
    loss_fn_inputs: dict[Text, Tensor]


class ForwardBackwardInput(Asked):
    """Data and a loss."""

    data: list[JsonDatum]
    loss_fn: Text
    loss_fn_config: dict[Text, float | str] | None = None


class ForwardBackwardRequest(Asked):
    """A pass of older clients, and `forward`."""

    model_id: Id
    seq_id: Number | None = None
    forward_backward_input: ForwardBackwardInput = Field(
        validation_alias=AliasChoices("forward_backward_input", "forward_input")
    )


class RetrieveFutureRequest(Asked):
    """The result of a request."""

    request_id: Id
    allow_metadata_only: bool = False


class CancelFutureRequest(Asked):
    """A request that is not wanted any more."""

    request_id: Id


class WeightsInfoRequest(Asked):
    """What a checkpoint is of."""

    tinker_path: Text


class SetTtlRequest(Asked):
    """How long a checkpoint stays; null: for ever."""

    ttl_seconds: Ttl | None


class CopyWeightsRequest(Asked):
    """A checkpoint of another run."""

    source_path: Text
    session_id: Id | None = None
    model_seq_id: Number | None = None
    destination_project_id: Text | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: Text | None = None


class AssignProjectRequest(Asked):
    """Of a session."""

    project_id: Annotated[Text, Len(1)]


class TelemetryRequest(Asked):
    """What clients tell of themselves; nothing is kept."""

    events: list[Any] = []
