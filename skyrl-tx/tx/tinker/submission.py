"""From what a client asks to a row that the engine will find: checks, defaults, names, and the payload."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from sqlmodel import Session

from tx.models.config import LoraConfig
from tx.tinker import store
from tx.tinker.admission import Admission
from tx.tinker.checkpoint_files import checked_name, parse_path
from tx.tinker.config import TxConfig
from tx.tinker.db_models import (
    Checkpoint,
    CheckpointKind,
    EngineState,
    Kind,
    Model,
    ModelStatus,
    Request,
    SamplingSession,
)
from tx.tinker.refusal import refuse
from tx.tinker.types import Pass
from tx.tinker.validation import check_base_model, check_lora
from tx.tinker.wire import requests as wire

A = TypeVar("A", bound=wire.Asked)
FIRST = 0
"""The number of the request that makes a model; clients count the others from 1."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Where requests are written down, for whom, and within which limits."""

    db: Session
    owner: str
    config: TxConfig
    admission: Admission

    @property
    def engine_state(self) -> EngineState | None:
        """Of the base model."""
        return store.engine_state(self.db, self.config.model_name)

    def add(self, request: Request, check: Callable[[], None]) -> int:
        """The id of a request: of the earlier one if it is a repetition, and else of a new one that `check` admits."""
        request.owner = self.owner
        earlier = store.earlier_request(self.db, request)
        if earlier is not None:
            assert earlier.request_id is not None
            return earlier.request_id
        check()
        self.admission.admit(self.db, request)
        self.db.add(request)
        self.db.flush()
        assert request.request_id is not None
        return request.request_id


def _request(kind: Kind, model: Model, seq_id: int | None, payload: bytes, asked: bytes | None = None) -> Request:
    """`asked` is what is compared when it comes again, where the payload has more."""
    return Request(
        kind=kind,
        session_id=model.session_id,
        model_id=model.model_id,
        seq_id=seq_id or None if kind not in (Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS) else seq_id,
        payload=payload,
        payload_hash=store.hash_of(payload if asked is None else asked),
    )


def _json(asked: wire.Asked) -> bytes:
    return asked.model_dump_json(exclude_none=True).encode()


def create_model(to: Submission, asked: wire.CreateModelRequest) -> int:
    """A new model, of the next number of its session."""
    lora = asked.lora_config or wire.Lora()
    seed = secrets.randbelow(1 << 31) if lora.seed is None else lora.seed % (1 << 64)  # generators take none below 0
    chosen = lora.model_copy(update={"seed": seed})
    model = _new_model(asked.session_id, asked.model_seq_id, to.config, LoraConfig(**chosen.model_dump()))
    model.user_metadata = asked.user_metadata
    whole = asked.model_copy(update={"lora_config": chosen, "model_id": model.model_id})
    request = _request(Kind.CREATE_MODEL, model, FIRST, _json(whole), asked=_json(asked))
    store.find_session(to.db, asked.session_id, to.owner)

    def check() -> None:
        check_base_model(asked.base_model, to.config)
        _check_optimizer(asked.optimizer_config)
        trains_any = lora.train_attn or lora.train_mlp or lora.train_unembed
        check_lora(lora.rank, trains_any=trains_any, config=to.config, state=to.engine_state)
        _add_model(to, model)

    return to.add(request, check)


def _new_model(session_id: str, model_seq_id: int, config: TxConfig, lora: LoraConfig) -> Model:
    return Model(
        model_id=store.model_id_of(session_id, model_seq_id),
        session_id=session_id,
        model_seq_id=model_seq_id,
        base_model=config.model_name,
        rank=lora.rank,
        lora=asdict(lora),
    )


def _add_model(to: Submission, model: Model) -> None:
    store.active_session(to.db, model.session_id, to.owner)
    if to.db.get(Model, model.model_id) is not None:
        refuse(f"there is a model {model.model_id} already; count model_seq_id up for each new one")
    n_models = store.n_models(to.db, model.base_model)
    if n_models >= to.config.max_models:
        refuse(
            f"there are {n_models} models under training, which is the server's limit, --max-models; "
            "unload one, end a session that has one, or try again when another client has"
        )
    most = to.config.max_models_per_user
    if most is not None and store.n_models(to.db, model.base_model, to.owner) >= most:
        refuse(
            f"{most} of your models are under training, which is the limit of each user, --max-models-per-user; "
            "unload one, or end a session that has one"
        )
    to.db.add(model)
    to.db.flush()


def _check_optimizer(optimizer: wire.Optimizer | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        refuse(f"optimizer type={optimizer.type!r} is not supported by this server; use adamw")


def load_weights(to: Submission, asked: wire.LoadWeightsRequest) -> int:
    """A checkpoint into a new model, or into one that was just created."""
    if asked.session_id is not None and asked.model_seq_id is not None and asked.model_id is None:
        return _load_as_new(to, asked, asked.session_id, asked.model_seq_id)
    if asked.model_id is None or asked.session_id is not None:
        refuse("load_weights takes either session_id and model_seq_id, or model_id")
    return _load_into(to, asked, asked.model_id)


def _load_as_new(to: Submission, asked: wire.LoadWeightsRequest, session_id: str, model_seq_id: int) -> int:
    store.find_session(to.db, session_id, to.owner)
    checkpoint = _training_checkpoint(to, asked.path)
    model = _new_model(session_id, model_seq_id, to.config, LoraConfig(**checkpoint.lora))
    model.user_metadata = asked.user_metadata
    whole = asked.model_copy(update={"model_id": model.model_id})
    request = _request(Kind.LOAD_WEIGHTS, model, FIRST, _json(whole), asked=_json(asked))

    def check() -> None:
        check_base_model(asked.base_model or to.config.model_name, to.config)
        _check_loaded(to, asked, checkpoint)
        check_lora(model.rank, trains_any=True, config=to.config, state=to.engine_state)
        _add_model(to, model)

    return to.add(request, check)


def _load_into(to: Submission, asked: wire.LoadWeightsRequest, model_id: str) -> int:
    model = store.find_model(to.db, model_id, to.owner)
    request = _request(Kind.LOAD_WEIGHTS, model, asked.seq_id, _json(asked))

    def check() -> None:
        _check_active(to, model_id)
        if store.has_trained(to.db, model_id):
            refuse(
                f"LoadWeights is not permitted for model {model_id}, which has had other requests; "
                "it must be the first, so load into a new model"
            )
        checkpoint = _training_checkpoint(to, asked.path)
        _check_loaded(to, asked, checkpoint)
        if checkpoint.lora["rank"] != model.rank:
            refuse(f"{asked.path} has rank {checkpoint.lora['rank']}, and model {model_id} has {model.rank}")

    return to.add(request, check)


def _training_checkpoint(to: Submission, path: str) -> Checkpoint:
    checkpoint = store.find_checkpoint(to.db, path, to.owner)
    if checkpoint.kind is not CheckpointKind.TRAINING:
        refuse(f"{path} is to sample from; load what save_weights wrote, tinker://<model>/{CheckpointKind.TRAINING}/…")
    return checkpoint


def _check_loaded(to: Submission, asked: wire.LoadWeightsRequest, checkpoint: Checkpoint) -> None:
    check_no_token(asked.weights_access_token)
    _check_optimizer(asked.optimizer_config)
    if checkpoint.base_model != to.config.model_name:
        refuse(f"{asked.path} is of {checkpoint.base_model}, and this server has {to.config.model_name}")


def check_no_token(weights_access_token: str | None) -> None:
    """Refuse what would give access to others' checkpoints."""
    if weights_access_token is not None:
        refuse("weights_access_token is not supported by this server; publish the checkpoint, and leave it out")


def forward_backward(to: Submission, asked: Pass, seq_id: int | None, payload: bytes) -> int:
    """A pass, whose data are checked already, since that takes a while."""
    model = store.find_model(to.db, asked.model_id, to.owner)
    request = _request(Kind.FORWARD_BACKWARD, model, seq_id, payload)
    return to.add(request, lambda: _check_active(to, asked.model_id))


def _check_active(to: Submission, model_id: str) -> None:
    model = store.active_model(to.db, model_id, to.owner)
    if model.base_model != to.config.model_name:
        refuse(
            f"model {model_id} needs the base model {model.base_model}, and this server has {to.config.model_name}; "
            "its models come back when it is served again"
        )
    if model.lost_because is not None:
        refuse(
            f"model {model_id} could not be brought back when the server was started: {model.lost_because}; "
            "the next start tries again; or unload it, and load a checkpoint of it into a new one"
        )


def optim_step(to: Submission, asked: wire.OptimStepRequest) -> int:
    """A step of AdamW."""
    if asked.adam_params is None:
        _check_optimizer(asked.optimizer_params)
        refuse("optim_step lacks adam_params")
    return _of_model(to, Kind.OPTIM_STEP, asked.model_id, asked.seq_id, asked)


def save_weights(to: Submission, asked: wire.SaveWeightsRequest) -> int:
    """A checkpoint to go on from."""
    whole = _named(asked, asked.path, asked.seq_id)
    may_be_there = asked.overwrite
    return _save(to, Kind.SAVE_WEIGHTS, CheckpointKind.TRAINING, whole, whole.path, may_be_there=may_be_there)


def save_weights_external(to: Submission, asked: wire.SaveWeightsExternalRequest) -> int:
    """A checkpoint for other programs."""
    if asked.age_encryption_recipients:
        refuse("age_encryption_recipients is not supported by this server; leave it out")
    return _save(to, Kind.SAVE_WEIGHTS_EXTERNAL, CheckpointKind.EXTERNAL, asked, asked.path)


def save_weights_for_sampler(to: Submission, asked: wire.SaveWeightsForSamplerRequest) -> int:
    """A checkpoint to sample from, or a snapshot without a name."""
    if asked.kind != "snapshot":
        refuse(f"kind={asked.kind!r} is not supported by this server; use snapshot")
    kind = Kind.SAVE_WEIGHTS_FOR_SAMPLER
    if asked.sampling_session_seq_id is None:
        whole = _named(asked, asked.path, asked.seq_id)
        return _save(to, kind, CheckpointKind.SAMPLER, whole, whole.path)
    if asked.path is not None:
        refuse("save_weights_for_sampler takes either path or sampling_session_seq_id, and not both")
    if asked.ttl_seconds is not None or asked.user_metadata:
        refuse("ttl_seconds and user_metadata are for a sampler with a name; give it one, or leave them out")
    model = store.find_model(to.db, asked.model_id, to.owner)
    snapshot = store.sampling_session_id_of(model.session_id, asked.sampling_session_seq_id)
    whole = asked.model_copy(update={"sampling_session_id": snapshot})

    def check() -> None:
        if to.db.get(SamplingSession, snapshot) is not None:
            refuse(f"there is a sampling session {snapshot} already; count up for each new one")

    return _of_model(to, kind, asked.model_id, asked.seq_id, whole, check)


def _named(asked: A, path: str | None, seq_id: int | None) -> A:
    """A checkpoint without a name gets one of its number."""
    if path is not None:
        return asked
    name = f"{seq_id:06d}" if seq_id is not None else secrets.token_hex(8)
    return asked.model_copy(update={"path": name})


def _save(
    to: Submission,
    kind: Kind,
    checkpoint_kind: CheckpointKind,
    asked: wire.SaveWeightsRequest | wire.SaveWeightsForSamplerRequest | wire.SaveWeightsExternalRequest,
    path: str | None,
    *,
    may_be_there: bool = False,
) -> int:
    name = checked_name(path or "")

    def check() -> None:
        if not may_be_there and to.db.get(Checkpoint, (asked.model_id, checkpoint_kind, name)) is not None:
            there = f"tinker://{asked.model_id}/{checkpoint_kind}/{name}"
            fix = "overwrite it, or " if checkpoint_kind is CheckpointKind.TRAINING else ""
            refuse(f"there is a checkpoint {there} already; {fix}use another name")

    return _of_model(to, kind, asked.model_id, asked.seq_id, asked, check)


def unload_model(to: Submission, asked: wire.ModelRequest) -> int:
    """Forget a model. Again is the same request."""
    model = store.find_model(to.db, asked.model_id, to.owner)
    if (earlier := store.unload_request(to.db, model.model_id)) is not None:
        return earlier

    def check() -> None:
        if model.lost_because is not None:  # to unload it is all that can be asked of it
            store.fail_waiting(to.db, model, model.lost_because)
        _check_active(to, asked.model_id)
        model.status = ModelStatus.UNLOADING  # so that there is room for another at once

    return to.add(_request(Kind.UNLOAD_MODEL, model, None, _json(asked)), check)


def _of_model(
    to: Submission,
    kind: Kind,
    model_id: str,
    seq_id: int | None,
    asked: wire.Asked,
    also_check: Callable[[], None] | None = None,
) -> int:
    model = store.find_model(to.db, model_id, to.owner)

    def check() -> None:
        _check_active(to, model_id)
        if also_check is not None:
            also_check()

    return to.add(_request(kind, model, seq_id, _json(asked)), check)


def check_sampled_path(to: Submission, path: str) -> None:
    """A path to sample from must be of weights that are there."""
    if parse_path(path).kind is CheckpointKind.EXTERNAL:
        refuse(f"{path} is for other programs; sample from weights or sampler_weights")
    checkpoint = store.find_checkpoint(to.db, path, to.owner)
    if checkpoint.base_model != to.config.model_name:
        refuse(f"{path} is of {checkpoint.base_model}, and this server has {to.config.model_name}")
