"""Sampling sessions and samples."""

from fastapi import APIRouter, Response

from tx.tinker.db_models import Kind
from tx.tinker.refusal import RefusalError
from tx.tinker.server.replies import reply
from tx.tinker.server.service import Caller
from tx.tinker.store import queries
from tx.tinker.submission import sampling as sample_submission
from tx.tinker.wire import requests as wire
from tx.tinker.wire import responses as responses

router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(call: Caller, body: wire.CreateSamplingSessionRequest) -> Response:
    """Create a sampling session."""
    created = await call.submit(lambda to: sample_submission.create_sampling_session(to, body), is_durable=False)
    call.add_notes(session=body.session_id)
    return reply(responses.SamplingSessionCreated(sampling_session_id=created))


@router.get("/samplers/{sampler_id}")
async def get_sampler(call: Caller, sampler_id: str) -> Response:
    """Describe a sampling session."""
    found = await call.read(lambda db, owner: queries.find_sampling_session(db, sampler_id, owner))
    fields = {"base_model": found.base_model, "model_path": found.model_path}
    return reply(responses.SamplerInfo(sampler_id=found.sampling_session_id, **fields))


@router.post("/asample")
async def asample(call: Caller, body: wire.AsampleRequest) -> Response:
    """Queue a sample request. Return a promise and an id for each sample."""
    if call.service.failure is not None:
        raise RefusalError(503, call.service.failure, retry_after=10)
    head = await call.prepare(lambda to: sample_submission.sample_head(to, body))
    request = await call.service.compute(lambda: sample_submission.sample_request(head, body))
    request_id = await call.submit(lambda to: sample_submission.accept_sample(to, request), is_durable=False)
    metrics = call.service.metrics
    metrics.accepted.labels(Kind.SAMPLE).inc()
    metrics.tokens.labels("prompt").inc(sum(map(_count_tokens, body.prompt.chunks)))
    call.add_notes(session=body.sampling_session_id, request=request_id)
    names = [f"{request_id}-{number}" for number in range(body.num_samples)]
    return reply(responses.SamplePromise(request_id=str(request_id), sample_sequence_ids=names))


def _count_tokens(chunk: wire.Chunk) -> int:
    return (chunk.expected_tokens or 0) if chunk.tokens is None else len(chunk.tokens)
