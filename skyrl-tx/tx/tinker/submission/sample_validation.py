"""Convert a client's sample request to a job for the engine. Raise `UserError` if it is invalid."""

from __future__ import annotations

from tx.tinker.backends.stop_strings import MAX_STOP_CHARACTERS
from tx.tinker.db_models import EngineState
from tx.tinker.losses import LOSSES
from tx.tinker.submission.validation import check_tokens
from tx.tinker.types import MAX_STOP_TOKENS, MAX_TOP, UserError
from tx.tinker.wire.requests import AsampleRequest, SamplingSettings
from tx.tinker.wire.sample_job import SampleJob, SampleWeights
from tx.tinker.wire.tensors import chunk_tokens


def sample_job(body: AsampleRequest, weights: SampleWeights, state: EngineState | None) -> SampleJob:
    """Return a request's job. `state` is None until an engine has reported."""
    _refuse_unsupported(body)
    prompt = [token for chunk in body.prompt.chunks for token in chunk_tokens(chunk.model_dump(), "prompt")]
    if not prompt:
        raise UserError("prompt is empty; pass at least one token")
    params = body.sampling_params
    tokens, strings = _stops(params)
    job = SampleJob(
        weights=weights,
        prompt=prompt,
        n_samples=body.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k or -1,
        top_p=params.top_p,
        seed=params.seed,
        stop_tokens=tokens,
        stop_strings=strings,
        wants_prompt_logprobs=bool(body.prompt_logprobs),
        n_top_prompt=_top("topk_prompt_logprobs", body.topk_prompt_logprobs),
        n_top_sampled=_top("topk_sample_logprobs", body.topk_sample_logprobs),
    )
    if state is not None:
        check_job(job, state)
    return job


def check_job(job: SampleJob, state: EngineState) -> None:
    """Check that a job fits the model."""
    check_tokens(job.prompt, "prompt", state)
    check_tokens(job.stop_tokens or [], "stop", state)
    _check_length(len(job.prompt), job.max_tokens, state)
    if job.stop_strings and not state.has_tokenizer:
        raise UserError("stop has strings, and the model's folder has no tokenizer; use tokens")
    n_top = max(job.n_top_prompt, job.n_top_sampled)
    if n_top > state.vocab_size:
        raise UserError(f"{n_top} most likely tokens were requested, and the vocabulary has {state.vocab_size}")


def _refuse_unsupported(body: AsampleRequest) -> None:
    """Reject unsupported options instead of ignoring them."""
    if body.record_stability_info:
        known = ", ".join(name for name in LOSSES if name != "cross_entropy")
        raise UserError(f"record_stability_info is for loss_fn='stable_reinforce', which is not supported; use {known}")
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"):
        value = getattr(body, name)
        if value is not None and value is not False and value != 0:
            raise UserError(f"{name} is not supported by this server; remove it")


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


def _check_length(n_prompt: int, max_tokens: int | None, state: EngineState) -> None:
    """Check the length. The last token is sampled but never read."""
    n_needed = n_prompt + (max_tokens or 1) - 1
    if n_needed > state.max_context:
        maximum = max(0, state.max_context - n_prompt + 1)
        raise UserError(
            f"a prompt of {n_prompt} tokens and max_tokens={max_tokens} exceed the model's {state.max_context} "
            f"positions; the maximum for this prompt is {maximum}"
        )


def _top(name: str, body: int) -> int:
    if body > MAX_TOP:
        raise UserError(f"{name}={body} is more than {MAX_TOP}")
    return body
