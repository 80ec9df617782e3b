"""Sampling sessions, and samples."""

from __future__ import annotations

from fastapi import APIRouter, Response
from sqlmodel import Session

from tx.tinker import sample_submission, store
from tx.tinker.db_models import Kind
from tx.tinker.refusal import Refusal
from tx.tinker.replies import reply
from tx.tinker.service import Caller
from tx.tinker.wire import requests as wire
from tx.tinker.wire import responses as answers

router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(call: Caller, asked: wire.CreateSamplingSessionRequest) -> Response:
    """Weights to sample from."""
    created = await call.submit(lambda to: sample_submission.create_sampling_session(to, asked))
    call.note(session=asked.session_id)
    return reply(answers.SamplingSessionCreated(sampling_session_id=created))


@router.get("/samplers/{sampler_id}")
async def get_sampler(call: Caller, sampler_id: str) -> Response:
    """What is sampled from."""

    def describe(db: Session, owner: str) -> answers.SamplerInfo:
        found = store.find_sampling_session(db, sampler_id, owner)
        return answers.SamplerInfo(
            sampler_id=found.sampling_session_id, base_model=found.base_model, model_path=found.model_path
        )

    return reply(await call.read(describe))


@router.post("/asample")
async def asample(call: Caller, asked: wire.SampleRequest) -> Response:
    """A promise of samples, and a name for each."""
    if call.service.failure is not None:
        raise Refusal(503, call.service.failure, retry_after=10)
    request = await call.prepare(lambda to: sample_submission.sample_request(to, asked))
    request_id = await call.submit(lambda to: sample_submission.accept_sample(to, request))
    metrics = call.service.metrics
    metrics.accepted.labels(Kind.SAMPLE).inc()
    metrics.tokens.labels("prompt").inc(sum(len(chunk.tokens or ()) for chunk in asked.prompt.chunks))
    call.note(session=asked.sampling_session_id, request=request_id)
    names = [f"{request_id}-{number}" for number in range(asked.num_samples)]
    return reply(answers.SamplePromise(request_id=str(request_id), sample_sequence_ids=names))
