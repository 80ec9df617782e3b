"""Accept sampling sessions (with immutable weights) and sample requests."""

from __future__ import annotations

from tx.tinker.db_models import Kind, SamplingSession, TxRequest
from tx.tinker.refusal import refuse
from tx.tinker.store import queries
from tx.tinker.submission.sample_validation import sample_job
from tx.tinker.submission.training import Submission, check_sampled_path
from tx.tinker.submission.validation import check_base_model
from tx.tinker.wire.requests import AsampleRequest, CreateSamplingSessionRequest
from tx.tinker.wire.sample_job import SampleWeights


def create_sampling_session(to: Submission, body: CreateSamplingSessionRequest) -> str:
    """Return the id of a session for the base model or for `model_path`. A repeated number is the same session."""
    session = queries.active_session(to.db, body.session_id, to.owner)
    if body.base_model is None and body.model_path is None:
        refuse("create_sampling_session lacks both base_model and model_path; set one of them")
    if body.base_model is not None:
        check_base_model(body.base_model, to.config)
    if body.model_path is not None:
        check_sampled_path(to, body.model_path)
    new = SamplingSession(
        sampling_session_id=queries.sampling_session_id_of(session.session_id, body.sampling_session_seq_id),
        session_id=session.session_id,
        seq_id=body.sampling_session_seq_id,
        base_model=to.config.model_name,
        model_path=body.model_path,
    )
    earlier = to.db.get(SamplingSession, new.sampling_session_id)
    if earlier is None:
        to.db.add(new)
    elif (earlier.model_path, earlier.model_id) != (new.model_path, None):
        refuse(
            f"sampling session {new.sampling_session_id} has different weights; increment its number for each new one"
        )
    return new.sampling_session_id


def sample_request(to: Submission, body: AsampleRequest) -> TxRequest:
    """Return a sample request's row without writing it."""
    body_bytes = body.model_dump_json(exclude_none=True).encode()
    request = TxRequest(kind=Kind.SAMPLE, payload=b"", payload_hash=queries.hash_of(body_bytes))
    if body.sampling_session_id is not None:
        session = queries.find_sampling_session(to.db, body.sampling_session_id, to.owner)
        request.session_id = session.session_id
        request.sampling_session_id, request.sample_seq_id = session.sampling_session_id, body.seq_id
        snapshot = session.sampling_session_id if session.model_id is not None else None
        weights = SampleWeights(base_model=session.base_model, model_path=session.model_path, snapshot=snapshot)
    elif body.base_model is None and body.model_path is None:
        refuse("asample takes sampling_session_id, base_model or model_path")
    else:
        weights = SampleWeights(base_model=to.config.model_name, model_path=body.model_path)
    if body.base_model is not None:
        check_base_model(body.base_model, to.config)
    if weights.base_model != to.config.model_name:
        refuse(
            f"{body.sampling_session_id} belongs to base model {weights.base_model}, "
            f"and this server has {to.config.model_name}"
        )
    if weights.model_path is not None and queries.earlier_request(to.db, request) is None:
        check_sampled_path(to, weights.model_path)
    request.payload = sample_job(body, weights, to.engine_state).model_dump_json().encode()
    return request


def accept_sample(to: Submission, request: TxRequest) -> int:
    """Queue a sample request. Return its number."""

    def check() -> None:
        if request.session_id is not None:
            queries.active_session(to.db, request.session_id, to.owner)

    return to.add(request, check)
