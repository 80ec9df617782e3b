"""A sampler that chooses tokens inside vLLM as the embedded engine does, with the same log-probs.

vLLM's own sampler reports one log-prob per token: of the raw logits at temperature 1, or of the distribution after
penalties and truncation. The model's log-prob at the request's temperature is neither. On a CPU it also lacks seeds for
prompts that are read in chunks. With this sampler, both engines sample the same tokens from the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplerOutput

from skyrl_train.inference_engines.base import EngineRequest
from skyrl_train.inference_engines.sampling import Draw, SampledToken, choose_tokens

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

CHUNK_LOGITS = 1 << 24  # logits copied at once: 64 MiB
REQUEST = "request"  # key of our request in the `extra_args` of vLLM's sampling parameters
N_LEADING = 3  # columns before the most likely tokens: `logprob`, `sampling_logprob`, `raw_logprob`


def install_sampler(worker: WorkerBase, eos_ids: frozenset[int]) -> None:
    """Replace the sampler of a worker's model runner."""
    worker.model_runner.sampler = PositionSampler(worker.model_runner, eos_ids)


class PositionSampler:
    """A stateless sampler: random numbers depend on a request's seed and a token's position."""

    def __init__(self, runner: GPUModelRunner, eos_ids: frozenset[int]) -> None:
        self._runner = runner
        self._eos_ids = eos_ids

    def __call__(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        """Sample a token for every row of `logits` (B, V). vLLM ignores rows whose prompt is not read completely."""
        draws = [self._draw(row) for row in range(len(logits))]
        n_rows = max(1, CHUNK_LOGITS // logits.shape[-1])
        choices = [
            choice
            for i in range(0, len(draws), n_rows)
            for choice in choose_tokens(logits[i : i + n_rows].float(), draws[i : i + n_rows])
        ]
        token_ids = torch.tensor([[choice.token_id] for choice in choices], dtype=torch.int32, device=logits.device)
        return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=to_columns(choices))

    def _draw(self, row: int) -> Draw:
        batch = self._runner.input_batch
        params = self._runner.requests[batch.req_ids[row]].sampling_params
        request: EngineRequest = params.extra_args[REQUEST]
        token_ids = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]  # prompt and response so far
        return Draw(request.sampling, request.seed, memoryview(token_ids), len(request.prompt_ids), self._eos_ids)


def to_columns(choices: Sequence[SampledToken]) -> LogprobsTensors:
    """Pack choices into columns that vLLM passes on as log-probs. NaN and -1 stand for missing values."""
    tops = [choice.top_logprobs or {} for choice in choices]
    n_top = max(len(top) for top in tops)
    values = np.full((len(choices), N_LEADING + n_top), math.nan, dtype=np.float32)
    token_ids = np.full(values.shape, -1, dtype=np.int32)
    for row, (choice, top) in enumerate(zip(choices, tops, strict=True)):
        values[row, :N_LEADING] = [
            choice.logprob,
            math.nan if choice.sampling_logprob is None else choice.sampling_logprob,
            math.nan if choice.raw_logprob is None else choice.raw_logprob,
        ]
        token_ids[row, :N_LEADING] = choice.token_id
        values[row, N_LEADING : N_LEADING + len(top)] = list(top.values())
        token_ids[row, N_LEADING : N_LEADING + len(top)] = list(top)
    ranks = torch.zeros(len(choices), dtype=torch.int32)
    return LogprobsTensors(torch.from_numpy(token_ids), torch.from_numpy(values), ranks)


def from_columns(columns: LogprobsLists) -> list[SampledToken]:
    """Unpack the choices of one request."""
    return [
        SampledToken(
            token_ids[0], values[0], _value_or_none(values[1]), _value_or_none(values[2]), _top(token_ids, values)
        )
        for token_ids, values in zip(columns.logprob_token_ids.tolist(), columns.logprobs.tolist(), strict=True)
    ]


def _value_or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _top(token_ids: Sequence[int], values: Sequence[float]) -> dict[int, float] | None:
    pairs = zip(token_ids[N_LEADING:], values[N_LEADING:], strict=True)
    return {token_id: value for token_id, value in pairs if token_id >= 0} or None
