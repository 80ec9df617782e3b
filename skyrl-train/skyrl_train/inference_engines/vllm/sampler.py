"""A sampler inside vLLM that chooses tokens as the embedded engine does, with the same log-probs.

vLLM's own sampler reports one log-prob per token: of the raw logits at temperature 1, or of the distribution after
penalties and truncation. Training needs neither: it needs the model's log-prob at the request's temperature. On a CPU,
vLLM's sampler also has no seeds for prompts that are prefilled in chunks. With this sampler, both engines sample the
same tokens from the same seed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplerOutput

from skyrl_train.inference_engines.base import MIN_TEMPERATURE, SamplingParams
from skyrl_train.inference_engines.sampling import Draw, SampledToken, choose_in_chunks
from skyrl_train.inference_engines.vllm.wire import (
    MISSING,
    N_LEADING,
    NAN,
    REQUEST,
    SAMPLING,
    SamplerRequest,
    decode_request,
    unpack,
)

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class PositionSampler:
    """A stateless sampler. Random numbers depend only on a request's seed and a token's position."""

    def __init__(self, runner: GPUModelRunner, eos_ids: frozenset[int]) -> None:
        self._runner = runner
        self._eos_ids = eos_ids

    def __call__(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        """Sample a token for each row of `logits` (B, V). vLLM ignores rows whose prefill is incomplete."""
        draws = [self._draw(row) for row in range(len(logits))]
        choices = choose_in_chunks(draws, logits.shape[-1], lambda rows: logits[rows].float())
        token_ids = torch.tensor([[choice.token_id] for choice in choices], dtype=torch.int32, device=logits.device)
        return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=to_columns(choices))

    def _draw(self, row: int) -> Draw:
        batch = self._runner.input_batch
        state = self._runner.requests[batch.req_ids[row]]
        params = state.sampling_params
        if params.extra_args is None:
            params.extra_args = {}
        request = params.extra_args.get(REQUEST)
        if not isinstance(request, SamplerRequest):
            request = _foreign_request(state) if request is None else decode_request(request)
            params.extra_args[REQUEST] = request
        token_ids = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]  # prompt and response so far
        return Draw(request.sampling, request.seed, memoryview(token_ids), request.n_prompt, self._eos_ids)


def _foreign_request(state: CachedRequestState) -> SamplerRequest:
    """Convert a request from another client of vLLM's server. All workers draw the same random numbers for it."""
    params = state.sampling_params
    sampling = SamplingParams(
        max_new_tokens=max(1, params.max_tokens or 1),
        min_new_tokens=params.min_tokens,
        temperature=params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0,
        top_p=params.top_p,
        top_k=params.top_k if params.top_k > 0 else -1,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        stop_token_ids=tuple(params.stop_token_ids or ()),
        ignore_eos=params.ignore_eos,
        n_top_logprobs=max(0, params.logprobs or 0),
    )
    seed = zlib.crc32(state.req_id.encode()) if params.seed is None else params.seed
    return SamplerRequest(sampling, seed, state.num_prompt_tokens)


def to_columns(choices: Sequence[SampledToken]) -> LogprobsTensors:
    """Pack tokens and all their log-probs into columns that vLLM passes on as log-probs.

    With one top log-prob, a row is (token, logprob), (SAMPLING, …), (top token, …). Missing values have the
    token id `MISSING`, and NaN is written as `NAN`. `from_columns` is the inverse.
    """
    tops = [choice.top_logprobs or {} for choice in choices]
    n_top = max(len(top) for top in tops)
    values = np.zeros((len(choices), N_LEADING + n_top), dtype=np.float32)
    token_ids = np.full(values.shape, MISSING, dtype=np.int32)
    for row, (choice, top) in enumerate(zip(choices, tops, strict=True)):
        sampling = choice.sampling_logprob
        leading = [(choice.token_id, choice.logprob), (MISSING if sampling is None else SAMPLING, sampling or 0.0)]
        columns = [*leading, *top.items()]
        token_ids[row, : len(columns)], values[row, : len(columns)] = zip(*columns, strict=True)
    values[np.isnan(values)] = NAN
    ranks = torch.zeros(len(choices), dtype=torch.int32)
    return LogprobsTensors(torch.from_numpy(token_ids), torch.from_numpy(values), ranks)


def from_columns(columns: LogprobsLists) -> list[SampledToken]:
    """Unpack the sampled tokens of one request."""
    rows = zip(columns.logprob_token_ids.tolist(), columns.logprobs.tolist(), strict=True)
    return [unpack(list(zip(token_ids, values, strict=True))) for token_ids, values in rows]
