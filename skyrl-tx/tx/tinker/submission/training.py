"""Accept training requests: check them, fill in defaults and names, and queue them for the engine."""

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from sqlmodel import Session

from tx.models.config import AdapterConfig
from tx.tinker.config import TxConfig
from tx.tinker.db_models import (
    Checkpoint,
    CheckpointKind,
    EngineState,
    Kind,
    Model,
    ModelStatus,
    RequestStatus,
    SamplingSession,
    TxRequest,
    now,
)
from tx.tinker.refusal import refuse
from tx.tinker.store import queries
from tx.tinker.store.checkpoint_files import check_name, parse_path
from tx.tinker.submission.admission import Admission
from tx.tinker.submission.validation import check_base_model, check_lora
from tx.tinker.types import Pass, UserError, error_text
from tx.tinker.wire import requests as wire

A = TypeVar("A", bound=wire.RequestBody)
FIRST_SEQ_ID = 0
"""Number of the request that creates a model. Clients count all later requests from 1."""


@dataclass(frozen=True, slots=True)
class PassHead:
    """A pass without its data, and the canonical bytes of the whole, to recognize repetitions."""

    model_id: str
    seq_id: int | None
    payload: bytes
    original: bytes


@dataclass(frozen=True, slots=True)
class Submission:
    """The context of an accepted request: database session, user and limits."""

    db: Session
    owner: str
    config: TxConfig
    admission: Admission

    @property
    def engine_state(self) -> EngineState | None:
        """The engine's report on the base model."""
        return queries.engine_state(self.db, self.config.model_name)

    def add(self, request: TxRequest, check: Callable[[], None]) -> int:
        """Queue a request that passes `check`, and return its id. If it is a repetition, return the earlier id."""
        request.owner = self.owner
        earlier = queries.earlier_request(self.db, request)
        if earlier is not None:
            assert earlier.request_id is not None
            return earlier.request_id
        check()
        self.admission.admit(self.db, request)
        self.db.add(request)
        self.db.flush()
        assert request.request_id is not None
        return request.request_id


def _request(kind: Kind, model: Model, seq_id: int | None, payload: bytes, original: bytes | None = None) -> TxRequest:
    """Create the row of a request. Repetitions are recognized by `original` if the payload has additions."""
    return TxRequest(
        kind=kind,
        session_id=model.session_id,
        model_id=model.model_id,
        seq_id=seq_id or None if kind not in (Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS) else seq_id,
        payload=payload,
        payload_hash=queries.hash_of(payload if original is None else original),
    )


def _json(body: wire.RequestBody) -> bytes:
    return body.model_dump_json(exclude_none=True).encode()


def create_model(to: Submission, body: wire.CreateModelRequest) -> int:
    """Create a model."""
    lora = body.lora_config or wire.LoraSettings()
    # generators reject negative seeds
    seed = secrets.randbelow(1 << 31) if lora.seed is None else lora.seed % (1 << 64)
    chosen = lora.model_copy(update={"seed": seed})
    model = _new_model(body.session_id, body.model_seq_id, to.config, AdapterConfig(**chosen.model_dump()))
    model.user_metadata = body.user_metadata
    whole = body.model_copy(update={"lora_config": chosen, "model_id": model.model_id})
    request = _request(Kind.CREATE_MODEL, model, FIRST_SEQ_ID, _json(whole), original=_json(body))
    queries.find_session(to.db, body.session_id, to.owner)

    def check() -> None:
        check_base_model(body.base_model, to.config)
        _check_optimizer(body.optimizer_config)
        trains_any = lora.train_attn or lora.train_mlp or lora.train_unembed
        check_lora(lora.rank, trains_any=trains_any, config=to.config, state=to.engine_state)
        _add_model(to, model)

    return to.add(request, check)


def _new_model(session_id: str, model_seq_id: int, config: TxConfig, lora: AdapterConfig) -> Model:
    return Model(
        model_id=queries.model_id_of(session_id, model_seq_id),
        session_id=session_id,
        model_seq_id=model_seq_id,
        base_model=config.model_name,
        rank=lora.rank,
        lora=asdict(lora),
    )


def _add_model(to: Submission, model: Model) -> None:
    queries.active_session(to.db, model.session_id, to.owner)
    if to.db.get(Model, model.model_id) is not None:
        refuse(f"model {model.model_id} already exists; increment model_seq_id for each new one")
    n_models = queries.n_models(to.db, model.base_model)
    if n_models >= to.config.max_models:
        refuse(
            f"there are {n_models} models under training, which is the server's limit, --max-models; "
            "unload one, end its session, or try again later"
        )
    max_models = to.config.max_models_per_user
    if max_models is not None and queries.n_models(to.db, model.base_model, to.owner) >= max_models:
        refuse(
            f"your models under training have reached the limit per user, --max-models-per-user={max_models}; "
            "unload one, or end its session"
        )
    to.db.add(model)
    to.db.flush()


def _check_optimizer(optimizer: wire.OptimizerSettings | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        refuse(f"optimizer type={optimizer.type!r} is not supported by this server; use adamw")


def load_weights(to: Submission, body: wire.LoadWeightsRequest) -> int:
    """Load a checkpoint into a new model, or into a model that was just created."""
    if body.session_id is not None and body.model_seq_id is not None and body.model_id is None:
        return _load_as_new(to, body, body.session_id, body.model_seq_id)
    if body.model_id is None or body.session_id is not None:
        refuse("load_weights takes either session_id and model_seq_id, or model_id")
    return _load_into(to, body, body.model_id)


def _load_as_new(to: Submission, body: wire.LoadWeightsRequest, session_id: str, model_seq_id: int) -> int:
    queries.find_session(to.db, session_id, to.owner)
    checkpoint = _training_checkpoint(to, body.path)
    model = _new_model(session_id, model_seq_id, to.config, AdapterConfig(**checkpoint.lora))
    model.user_metadata = body.user_metadata
    whole = body.model_copy(update={"model_id": model.model_id})
    request = _request(Kind.LOAD_WEIGHTS, model, FIRST_SEQ_ID, _json(whole), original=_json(body))

    def check() -> None:
        check_base_model(body.base_model or to.config.model_name, to.config)
        _check_loaded(to, body, checkpoint)
        check_lora(model.rank, trains_any=True, config=to.config, state=to.engine_state)
        _add_model(to, model)

    return to.add(request, check)


def _load_into(to: Submission, body: wire.LoadWeightsRequest, model_id: str) -> int:
    model = queries.find_model(to.db, model_id, to.owner)
    request = _request(Kind.LOAD_WEIGHTS, model, body.seq_id, _json(body))

    def check() -> None:
        _check_active(to, model_id)
        if queries.has_requests(to.db, model_id):
            refuse(
                f"LoadWeights is not permitted for model {model_id}, which has had other requests; "
                "it must be the first, so load into a new model"
            )
        checkpoint = _training_checkpoint(to, body.path)
        _check_loaded(to, body, checkpoint)
        if checkpoint.lora["rank"] != model.rank:
            refuse(f"{body.path} has rank {checkpoint.lora['rank']}, but model {model_id} has {model.rank}")

    return to.add(request, check)


def _training_checkpoint(to: Submission, path: str) -> Checkpoint:
    checkpoint = queries.find_checkpoint(to.db, path, to.owner)
    if checkpoint.kind is not CheckpointKind.TRAINING:
        refuse(
            f"{path} has weights for sampling only; load a checkpoint of save_weights, tinker://<model>/{CheckpointKind.TRAINING}/…"
        )
    return checkpoint


def _check_loaded(to: Submission, body: wire.LoadWeightsRequest, checkpoint: Checkpoint) -> None:
    check_no_token(body.weights_access_token)
    _check_optimizer(body.optimizer_config)
    if checkpoint.base_model != to.config.model_name:
        refuse(f"{body.path} belongs to base model {checkpoint.base_model}, but this server has {to.config.model_name}")


def check_no_token(weights_access_token: str | None) -> None:
    """Reject tokens for checkpoints of other users."""
    if weights_access_token is not None:
        refuse("weights_access_token is not supported by this server; publish the checkpoint, and remove it")


def forward_backward(to: Submission, body: Pass, seq_id: int | None, payload: bytes) -> int:
    """Queue a pass. Its data was validated earlier, because validation is slow."""
    model = queries.find_model(to.db, body.model_id, to.owner)
    request = _request(Kind.FORWARD_BACKWARD, model, seq_id, payload)
    return to.add(request, lambda: _check_active(to, body.model_id))


def add_failed_pass(to: Submission, head: PassHead, error: UserError) -> int:
    """Record a pass with invalid data as failed. Return its number, as for an accepted pass.

    The following step then also fails. Otherwise, if the client had split a larger pass, the step would apply the other
    parts without this one.
    """
    model = queries.find_model(to.db, head.model_id, to.owner)
    request = _request(Kind.FORWARD_BACKWARD, model, head.seq_id, head.payload, original=head.original)
    request.status, request.completed_at = RequestStatus.FAILED, now()
    request.error, request.error_category = error_text(error), "user"
    return to.add(request, lambda: _check_active(to, head.model_id))


def _check_active(to: Submission, model_id: str) -> None:
    model = queries.active_model(to.db, model_id, to.owner)
    if model.base_model != to.config.model_name:
        refuse(
            f"model {model_id} needs the base model {model.base_model}, but this server has {to.config.model_name}; "
            "the model is available again when its base model is served"
        )
    if model.lost_because is not None:
        refuse(
            f"model {model_id} could not be restored when the server started: {model.lost_because}; "
            "restart the server to retry, or unload the model and load a checkpoint of it into a new one"
        )


def optim_step(to: Submission, body: wire.OptimStepRequest) -> int:
    """Queue an AdamW step."""
    if body.adam_params is None:
        _check_optimizer(body.optimizer_params)
        refuse("optim_step lacks adam_params")
    return _queue_for_model(to, Kind.OPTIM_STEP, body.model_id, body.seq_id, body)


def save_weights(to: Submission, body: wire.SaveWeightsRequest) -> int:
    """Queue a training checkpoint."""
    whole = _with_name(body, body.path, body.seq_id)
    return _save(to, Kind.SAVE_WEIGHTS, CheckpointKind.TRAINING, whole, overwrite=body.overwrite)


def save_weights_external(to: Submission, body: wire.SaveWeightsExternalRequest) -> int:
    """Queue a checkpoint for other programs."""
    if body.age_encryption_recipients:
        refuse("age_encryption_recipients is not supported by this server; remove it")
    return _save(to, Kind.SAVE_WEIGHTS_EXTERNAL, CheckpointKind.EXTERNAL, body)


def save_weights_for_sampler(to: Submission, body: wire.SaveWeightsForSamplerRequest) -> int:
    """Queue a checkpoint to sample from, or an unnamed snapshot."""
    if body.kind != "snapshot":
        refuse(f"kind={body.kind!r} is not supported by this server; use snapshot")
    kind = Kind.SAVE_WEIGHTS_FOR_SAMPLER
    if body.sampling_session_seq_id is None:
        return _save(to, kind, CheckpointKind.SAMPLER, _with_name(body, body.path, body.seq_id))
    if body.path is not None:
        refuse("save_weights_for_sampler takes either path or sampling_session_seq_id, not both")
    if body.ttl_seconds is not None or body.user_metadata:
        refuse("ttl_seconds and user_metadata need a named sampler; set path, or remove them")
    model = queries.find_model(to.db, body.model_id, to.owner)
    snapshot = queries.sampling_session_id_of(model.session_id, body.sampling_session_seq_id)
    whole = body.model_copy(update={"sampling_session_id": snapshot})

    def check() -> None:
        if to.db.get(SamplingSession, snapshot) is not None:
            refuse(f"sampling session {snapshot} already exists; increment its number for each new one")

    return _queue_for_model(to, kind, body.model_id, body.seq_id, whole, check)


def _with_name(body: A, path: str | None, seq_id: int | None) -> A:
    """Name an unnamed checkpoint after its number."""
    if path is not None:
        return body
    name = f"{seq_id:06d}" if seq_id is not None else secrets.token_hex(8)
    return body.model_copy(update={"path": name})


def _save(
    to: Submission,
    kind: Kind,
    checkpoint_kind: CheckpointKind,
    body: wire.SaveWeightsRequest | wire.SaveWeightsForSamplerRequest | wire.SaveWeightsExternalRequest,
    *,
    overwrite: bool = False,
) -> int:
    name = check_name(body.path or "")

    def check() -> None:
        if not overwrite and to.db.get(Checkpoint, (body.model_id, checkpoint_kind, name)) is not None:
            there = f"tinker://{body.model_id}/{checkpoint_kind}/{name}"
            fix = "overwrite it, or " if checkpoint_kind is CheckpointKind.TRAINING else ""
            refuse(f"checkpoint {there} already exists; {fix}use another name")

    return _queue_for_model(to, kind, body.model_id, body.seq_id, body, check)


def unload_model(to: Submission, body: wire.ModelRequest) -> int:
    """Unload a model. Repetitions return the same request."""
    model = queries.find_model(to.db, body.model_id, to.owner)
    if (earlier := queries.unload_request(to.db, model.model_id)) is not None:
        return earlier

    def check() -> None:
        if model.lost_because is not None:  # it accepts no other request
            queries.fail_waiting(to.db, model, model.lost_because)
        _check_active(to, body.model_id)
        model.status = ModelStatus.UNLOADING  # makes room for a new model immediately

    return to.add(_request(Kind.UNLOAD_MODEL, model, None, _json(body)), check)


def _queue_for_model(
    to: Submission,
    kind: Kind,
    model_id: str,
    seq_id: int | None,
    body: wire.RequestBody,
    extra_check: Callable[[], None] | None = None,
) -> int:
    model = queries.find_model(to.db, model_id, to.owner)

    def check() -> None:
        _check_active(to, model_id)
        if extra_check is not None:
            extra_check()

    return to.add(_request(kind, model, seq_id, _json(body)), check)


def check_sampled_path(to: Submission, path: str) -> None:
    """Check that a path has weights to sample from."""
    if parse_path(path).kind is CheckpointKind.EXTERNAL:
        refuse(f"{path} is for other programs; sample from weights or sampler_weights")
    checkpoint = queries.find_checkpoint(to.db, path, to.owner)
    if checkpoint.base_model != to.config.model_name:
        refuse(f"{path} belongs to base model {checkpoint.base_model}, but this server has {to.config.model_name}")
