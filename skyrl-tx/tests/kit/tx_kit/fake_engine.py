"""A stand-in for the engine: it answers pending requests on the real database, without computing."""

import itertools
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from sqlmodel import Session, col, select

from tx.tinker.config import TxConfig
from tx.tinker.db_models import (
    Checkpoint,
    CheckpointKind,
    Kind,
    Model,
    ModelStatus,
    RequestStatus,
    SamplingSession,
    TxRequest,
    now,
)
from tx.tinker.store.checkpoint_files import TinkerPath, checkpoint_folder
from tx.tinker.store.queries import expiry
from tx.tinker.types import Datum, ImageInput, PassResult, Sample, SampleResult, UserError
from tx.tinker.wire import codec, responses
from tx.tinker.wire import requests as wire
from tx.tinker.wire.sample_job import SampleJob

STATE = {
    "base_model": "org/tiny",
    "vocab_size": 100,
    "max_context": 64,
    "eos_ids": [2],
    "can_train_all": False,
    "has_tokenizer": True,
}
"""The state of an engine, as it reports it."""
KINDS = {
    Kind.SAVE_WEIGHTS: CheckpointKind.TRAINING,
    Kind.SAVE_WEIGHTS_FOR_SAMPLER: CheckpointKind.SAMPLER,
    Kind.SAVE_WEIGHTS_EXTERNAL: CheckpointKind.EXTERNAL,
}


def no_images(image: ImageInput) -> NoReturn:
    """Refuse an image, as a backend for text does."""
    raise UserError("no images here")


def answer_pending(db: Session, config: TxConfig, failure: tuple[str, str] | None) -> int:
    """Answer pending requests, or let them fail with an error and its category; return how many."""
    waiting = select(TxRequest).where(TxRequest.status == RequestStatus.PENDING).order_by(col(TxRequest.request_id))
    pending = db.exec(waiting).all()
    for request in pending:
        request.completed_at = now()
        if failure is not None:
            request.status = RequestStatus.FAILED
            request.error, request.error_category = failure
        else:
            request.status = RequestStatus.DONE
            request.is_result_protobuf = request.kind in (Kind.FORWARD_BACKWARD, Kind.SAMPLE)
            if request.kind is Kind.FORWARD_BACKWARD:
                pass_ = codec.pass_of(codec.message_from_bytes(request.payload), no_images)
                request.result = codec.forward_backward_bytes(pass_result(pass_.data))
            elif request.kind is Kind.SAMPLE:
                job = SampleJob.model_validate_json(request.payload)
                request.result = codec.sample_bytes(sample_result(job))
            else:
                request.result = _answer(db, request, config).to_bytes()
    return len(pending)


def pass_result(data: Sequence[Datum]) -> PassResult:
    """Return log-probs of -1, -2, …, whose sum is the loss."""
    logprobs = [-np.arange(1, datum.inputs["target_tokens"].size + 1, dtype=np.float32) for datum in data]
    shaped = [row.reshape(datum.inputs["target_tokens"].shape) for row, datum in zip(logprobs, data, strict=True)]
    return PassResult(-float(sum(row.sum() for row in logprobs)), shaped, [-row for row in shaped])


def sample_result(job: SampleJob) -> SampleResult:
    """Return samples 0 0 …, 1 1 …, of the maximum length."""
    n_tokens = min(job.max_tokens or 4, 4)
    samples = [Sample([number] * n_tokens, [-0.5] * n_tokens, is_stopped=False) for number in range(job.n_samples)]
    logprobs = np.array([np.nan, *itertools.repeat(-1.0, len(job.prompt) - 1)], np.float32)
    return SampleResult(samples, logprobs if job.wants_prompt_logprobs else None)


def _answer(db: Session, request: TxRequest, config: TxConfig) -> responses.ResponseBody:
    model = db.get_one(Model, request.model_id)
    if request.kind is Kind.CREATE_MODEL:
        model.status = ModelStatus.READY
        return responses.ModelCreated(model_id=model.model_id)
    if request.kind is Kind.LOAD_WEIGHTS:
        model.status = ModelStatus.READY
        body = wire.LoadWeightsRequest.model_validate_json(request.payload)
        return responses.WeightsLoaded(model_id=model.model_id, path=body.path)
    if request.kind is Kind.UNLOAD_MODEL:
        model.status = ModelStatus.UNLOADED
        return responses.ModelUnloaded(model_id=model.model_id)
    if request.kind is Kind.OPTIM_STEP:
        return responses.OptimStepDone(metrics={"skyrl.ai/grad_norm": 1.0})
    return _save_sampler(db, request, model, config)


def _save_sampler(db: Session, request: TxRequest, model: Model, config: TxConfig) -> responses.ResponseBody:
    body = wire.SaveWeightsForSamplerRequest.model_validate_json(request.payload)
    if body.sampling_session_id is not None:
        fields = {"sampling_session_id": body.sampling_session_id, "seq_id": body.sampling_session_seq_id}
        fields |= {"session_id": model.session_id, "model_id": model.model_id, "base_model": model.base_model}
        db.add(SamplingSession(**fields))
        return responses.SnapshotSaved(sampling_session_id=body.sampling_session_id)
    path = TinkerPath(model.model_id, KINDS[request.kind], body.path or "")
    folder = checkpoint_folder(config, str(path))
    (folder / "more").mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 4}')
    (folder / "more" / "weights.bin").write_bytes(bytes(range(256)) * 10)
    fields = {"base_model": model.base_model, "lora": model.lora, "size_bytes": 2568}
    fields |= {"user_metadata": body.user_metadata, "expires_at": expiry(body.ttl_seconds)}
    db.merge(Checkpoint(model_id=path.model_id, kind=path.kind, name=path.name, **fields))
    return responses.WeightsSaved(path=str(path), type=request.kind.value)
