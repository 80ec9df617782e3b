"""What a client asks to sample, as a job for the engine; `UserError` says what cannot be done."""

from __future__ import annotations

from tx.tinker.db_models import EngineState
from tx.tinker.losses import LOSSES
from tx.tinker.tokens import MOST_STOP_CHARACTERS
from tx.tinker.types import MOST_STOP_TOKENS, MOST_TOP, UserError
from tx.tinker.validation import check_tokens
from tx.tinker.wire.requests import SampleRequest, Sampling
from tx.tinker.wire.sample_job import SampleJob, SampleWeights
from tx.tinker.wire.tensors import chunk_tokens


def sample_job(asked: SampleRequest, weights: SampleWeights, state: EngineState | None) -> SampleJob:
    """The job of a request that asks for nothing unsupported; `state` is None before there was an engine."""
    _refuse_unsupported(asked)
    prompt = [token for chunk in asked.prompt.chunks for token in chunk_tokens(chunk.model_dump(), "prompt")]
    if not prompt:
        raise UserError("prompt is empty; give at least one token")
    params = asked.sampling_params
    tokens, strings = _stops(params)
    job = SampleJob(
        weights=weights,
        prompt=prompt,
        n_samples=asked.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k or -1,
        top_p=params.top_p,
        seed=params.seed,
        stop_tokens=tokens,
        stop_strings=strings,
        wants_prompt_logprobs=bool(asked.prompt_logprobs),
        n_top_prompt=_top("topk_prompt_logprobs", asked.topk_prompt_logprobs),
        n_top_sampled=_top("topk_sample_logprobs", asked.topk_sample_logprobs),
    )
    if state is not None:
        check_job(job, state)
    return job


def check_job(job: SampleJob, state: EngineState) -> None:
    """What is asked must fit the model."""
    check_tokens(job.prompt, "prompt", state)
    check_tokens(job.stop_tokens or [], "stop", state)
    _check_length(len(job.prompt), job.max_tokens, state)
    if job.stop_strings and not state.has_tokenizer:
        raise UserError("stop has strings, and the model's folder has no tokenizer; give tokens")
    n_top = max(job.n_top_prompt, job.n_top_sampled)
    if n_top > state.vocab_size:
        raise UserError(f"{n_top} of the likeliest tokens are asked for, and the model has {state.vocab_size} tokens")


def _refuse_unsupported(asked: SampleRequest) -> None:
    """What a client would take for granted is never left out without a word."""
    if asked.record_stability_info:
        known = ", ".join(name for name in LOSSES if name != "cross_entropy")
        raise UserError(f"record_stability_info is for loss_fn='stable_reinforce', which is not supported; use {known}")
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"):
        value = getattr(asked, name)
        if value is not None and value is not False and value != 0:
            raise UserError(f"{name} is not supported by this server; leave it out")


def _stops(params: Sampling) -> tuple[list[int] | None, list[str]]:
    """Tokens and strings that end a sample.

    Given tokens, even none, are all there is; strings come besides the tokens that end a sequence of the model.
    """
    stop = params.stop
    if stop is None:
        return None, []
    given = [stop] if isinstance(stop, str) else stop
    if len(given) > MOST_STOP_TOKENS:
        raise UserError(f"stop has {len(given)} entries; give at most {MOST_STOP_TOKENS}")
    tokens = [one for one in given if isinstance(one, int)]
    strings = [one for one in given if isinstance(one, str)]
    if not strings:
        return tokens, []
    for string in strings:
        if not 0 < len(string) <= MOST_STOP_CHARACTERS:
            told = f"stop holds {string[:100]!r}, of {len(string)} characters"
            raise UserError(f"{told}; give 1 to {MOST_STOP_CHARACTERS}")
    return None, strings


def _check_length(n_prompt: int, max_tokens: int | None, state: EngineState) -> None:
    """The last token is never read."""
    n_needed = n_prompt + (max_tokens or 1) - 1
    if n_needed > state.max_context:
        most = max(0, state.max_context - n_prompt + 1)
        raise UserError(
            f"a prompt of {n_prompt} tokens and max_tokens={max_tokens} are more than the model's {state.max_context} "
            f"positions; the most for this prompt is {most}"
        )


def _top(name: str, asked: int) -> int:
    if asked > MOST_TOP:
        raise UserError(f"{name}={asked} is more than {MOST_TOP}")
    return asked
