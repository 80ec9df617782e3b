"""Sampling: sessions of weights that never change, and samples from them."""

from __future__ import annotations

from tx.tinker import store
from tx.tinker.db_models import Kind, Request, SamplingSession
from tx.tinker.refusal import refuse
from tx.tinker.sample_validation import sample_job
from tx.tinker.submission import Submission, check_sampled_path
from tx.tinker.validation import check_base_model
from tx.tinker.wire.requests import CreateSamplingSessionRequest, SampleRequest
from tx.tinker.wire.sample_job import SampleWeights


def create_sampling_session(to: Submission, asked: CreateSamplingSessionRequest) -> str:
    """The id of a session for the base model, or for a checkpoint; the same number twice is the same session."""
    session = store.active_session(to.db, asked.session_id, to.owner)
    if (asked.base_model is None) == (asked.model_path is None):
        refuse("create_sampling_session takes either base_model or model_path")
    if asked.base_model is not None:
        check_base_model(asked.base_model, to.config)
    if asked.model_path is not None:
        check_sampled_path(to, asked.model_path)
    new = SamplingSession(
        sampling_session_id=store.sampling_session_id_of(session.session_id, asked.sampling_session_seq_id),
        session_id=session.session_id,
        seq_id=asked.sampling_session_seq_id,
        base_model=to.config.model_name,
        model_path=asked.model_path,
    )
    earlier = to.db.get(SamplingSession, new.sampling_session_id)
    if earlier is None:
        to.db.add(new)
    elif (earlier.model_path, earlier.model_id) != (new.model_path, None):
        refuse(f"sampling session {new.sampling_session_id} has other weights; count up for each new one")
    return new.sampling_session_id


def sample_request(to: Submission, asked: SampleRequest) -> Request:
    """The row of a sample; nothing is written yet."""
    asked_bytes = asked.model_dump_json(exclude_none=True).encode()
    request = Request(kind=Kind.SAMPLE, payload=b"", payload_hash=store.hash_of(asked_bytes))
    if asked.sampling_session_id is not None:
        session = store.find_sampling_session(to.db, asked.sampling_session_id, to.owner)
        request.session_id = session.session_id
        request.sampling_session_id, request.sample_seq_id = session.sampling_session_id, asked.seq_id
        snapshot = session.sampling_session_id if session.model_id is not None else None
        weights = SampleWeights(base_model=session.base_model, model_path=session.model_path, snapshot=snapshot)
    elif asked.base_model is None and asked.model_path is None:
        refuse("asample takes sampling_session_id, base_model or model_path")
    else:
        weights = SampleWeights(base_model=to.config.model_name, model_path=asked.model_path)
    if asked.base_model is not None:
        check_base_model(asked.base_model, to.config)
    if weights.base_model != to.config.model_name:
        refuse(f"{asked.sampling_session_id} is of {weights.base_model}, and this server has {to.config.model_name}")
    if weights.model_path is not None and store.earlier_request(to.db, request) is None:
        check_sampled_path(to, weights.model_path)
    request.payload = sample_job(asked, weights, to.engine_state).model_dump_json().encode()
    return request


def accept_sample(to: Submission, request: Request) -> int:
    """Write it down; its number."""

    def check() -> None:
        if request.session_id is not None:
            store.active_session(to.db, request.session_id, to.owner)

    return to.add(request, check)
