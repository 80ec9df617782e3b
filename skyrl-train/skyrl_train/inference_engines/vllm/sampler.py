"""Choosing tokens inside vLLM the way the embedded engine does, and what is known about them on its way out.

vLLM's own sampler cannot say what we ask of an engine. It reports one number per token, either of the untouched logits
at temperature 1 or of the distribution that is left after penalties and truncation; the model's log-prob at the
request's temperature is neither. On a CPU it also has no seeds for prompts that are read in chunks. So another sampler
takes its place: the same tokens for the same seed on both engines, and every number exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplerOutput

from skyrl_train.inference_engines.base import EngineRequest
from skyrl_train.inference_engines.sampling import Choice, Draw, choose_tokens

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

CHUNK_LOGITS = 1 << 24  # logits that are copied at once: 64 MiB
REQUEST = "request"  # where our request travels in the `extra_args` of vLLM's sampling parameters
N_LEADING = 3  # columns before the most likely tokens: log-prob, of the distribution sampled from, at temperature 1


def install_sampler(worker: WorkerBase, eos_ids: frozenset[int]) -> None:
    """Replace the sampler of a worker's model runner."""
    worker.model_runner.sampler = PositionSampler(worker.model_runner, eos_ids)


class PositionSampler:
    """A sampler whose randomness belongs to a request's seed and a token's position: nothing is kept between steps."""

    def __init__(self, runner: GPUModelRunner, eos_ids: frozenset[int]) -> None:
        self._runner = runner
        self._eos_ids = eos_ids

    def __call__(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        """One token for every row of `logits` (B, V). Rows that have not read their whole prompt are ignored later."""
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


def to_columns(choices: Sequence[Choice]) -> LogprobsTensors:
    """What is known about chosen tokens, as columns that vLLM hands on as log-probs: NaN and -1 stand for nothing."""
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


def from_columns(columns: LogprobsLists) -> list[Choice]:
    """The inverse of `to_columns`, for the tokens of one request."""
    return [
        Choice(token_ids[0], values[0], _known(values[1]), _known(values[2]), _top(token_ids, values))
        for token_ids, values in zip(columns.logprob_token_ids.tolist(), columns.logprobs.tolist(), strict=True)
    ]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _top(token_ids: Sequence[int], values: Sequence[float]) -> dict[int, float] | None:
    pairs = zip(token_ids[N_LEADING:], values[N_LEADING:], strict=True)
    return {token_id: value for token_id, value in pairs if token_id >= 0} or None
