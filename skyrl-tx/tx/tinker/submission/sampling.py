"""Accept sampling sessions (with immutable weights) and sample requests."""

from dataclasses import asdict, dataclass

from tx.tinker.backends.stop_strings import MAX_STOP_CHARACTERS
from tx.tinker.config import TxConfig
from tx.tinker.db_models import EngineState, Kind, SamplingSession, TxRequest
from tx.tinker.losses import LOSSES
from tx.tinker.refusal import refuse
from tx.tinker.store import queries
from tx.tinker.submission.images import SubmittedImages
from tx.tinker.submission.training import Submission, check_sampled_path
from tx.tinker.submission.validation import check_base_model, check_job
from tx.tinker.types import MAX_STOP_TOKENS, MAX_TOP, ImageInput, UserError
from tx.tinker.wire.chunks import chunk_from_json, decode_chunk
from tx.tinker.wire.requests import AsampleRequest, CreateSamplingSessionRequest, SamplingSettings
from tx.tinker.wire.sample_job import PromptImage, SampleJob, SampleWeights


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


@dataclass(frozen=True, slots=True)
class SampleHead:
    """A sample request without its prompt, and what `sample_request` needs to know to add it."""

    request: TxRequest  # without payload
    weights: SampleWeights
    config: TxConfig
    engine_state: EngineState | None  # None until an engine has reported


def sample_head(to: Submission, body: AsampleRequest) -> SampleHead:
    """Find the weights of a sample request."""
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
            f"but this server has {to.config.model_name}"
        )
    if weights.model_path is not None and queries.earlier_request(to.db, request) is None:
        check_sampled_path(to, weights.model_path)
    return SampleHead(request, weights, to.config, to.engine_state)


def sample_request(head: SampleHead, body: AsampleRequest) -> TxRequest:
    """Check a sample request and return its row without writing it. This is slow, because it decodes images."""
    job = _sample_job(body, head.weights, head.engine_state, SubmittedImages(head.config))
    head.request.payload = job.model_dump_json().encode()
    return head.request


def accept_sample(to: Submission, request: TxRequest) -> int:
    """Queue a sample request. Return its number."""

    def check() -> None:
        if request.session_id is not None:
            queries.active_session(to.db, request.session_id, to.owner)

    return to.add(request, check)


def _sample_job(
    body: AsampleRequest, weights: SampleWeights, state: EngineState | None, submitted: SubmittedImages
) -> SampleJob:
    _refuse_unsupported(body)
    prompt: list[int] = []
    images: list[PromptImage] = []
    for chunk in body.prompt.chunks:
        part = decode_chunk(chunk_from_json(chunk.model_dump(), "prompt"), "prompt")
        if isinstance(part, ImageInput):
            images.append(PromptImage(n_before=len(prompt), **asdict(part)))
        else:
            prompt += part.tolist()
    if not prompt and not images:
        raise UserError("prompt is empty; pass at least one token")
    params = body.sampling_params
    stop_tokens, stop_strings = _stops(params)
    job = SampleJob(
        weights=weights,
        prompt=prompt,
        images=images,
        n_samples=body.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k or -1,
        top_p=params.top_p,
        seed=params.seed,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        wants_prompt_logprobs=bool(body.prompt_logprobs),
        n_top_prompt=body.topk_prompt_logprobs,
        n_top_sampled=body.topk_sample_logprobs,
    )
    prompt_tokens, _ = job.read_prompt(submitted.read)
    if state is not None and submitted.has_all_lengths:
        check_job(job, prompt_tokens, state)
    return job


def _refuse_unsupported(body: AsampleRequest) -> None:
    """Reject unsupported options and values instead of ignoring them."""
    if body.record_stability_info:
        known = ", ".join(name for name in LOSSES if name != "cross_entropy")
        raise UserError(f"record_stability_info is for loss_fn='stable_reinforce', which is not supported; use {known}")
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"):
        value = getattr(body, name)
        if value is not None and value is not False and value != 0:
            raise UserError(f"{name} is not supported by this server; remove it")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(body, name) > MAX_TOP:
            raise UserError(f"{name}={getattr(body, name)} is more than {MAX_TOP}")


def _stops(params: SamplingSettings) -> tuple[list[int] | None, list[str]]:
    """Return the tokens and strings that end a sample.

    Explicit tokens, even an empty list, replace the EOS tokens. Strings are added to them.
    """
    stop = params.stop
    if stop is None:
        return None, []
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOP_TOKENS:
        raise UserError(f"stop has {len(stops)} entries; pass at most {MAX_STOP_TOKENS}")
    tokens = [stop for stop in stops if isinstance(stop, int)]
    strings = [stop for stop in stops if isinstance(stop, str)]
    if not strings:
        return tokens, []
    for string in strings:
        if not 0 < len(string) <= MAX_STOP_CHARACTERS:
            problem = f"stop has {string[:100]!r}, of {len(string)} characters"
            raise UserError(f"{problem}; pass 1 to {MAX_STOP_CHARACTERS}")
    return None, strings
