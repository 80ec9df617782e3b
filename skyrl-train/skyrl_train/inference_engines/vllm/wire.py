"""Messages between an engine and vLLM's workers, as plain values that can travel over HTTP. Does not need vLLM."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple

import torch

from skyrl_train.config.generator import NATIVE_TEMPERATURES
from skyrl_train.errors import EngineError, SyncError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.sampling import SampledToken
from skyrl_train.inference_engines.scheduled import SamplingLimits
from skyrl_train.types.specs import TensorSpec
from skyrl_train.weight_sync import Receipt, SyncPlan

NATIVE_LIMITS = SamplingLimits(
    "generator.vllm.sampler=native", "set generator.vllm.sampler=seeded", NATIVE_TEMPERATURES
)
NATIVE_LOGPROBS = "processed_logprobs"  # vLLM's mode that reports log-probs at the request's temperature

EXTENSION = "skyrl_train.inference_engines.vllm.worker.WorkerExtension"
REQUEST = "skyrl"  # key of our request in the `extra_args` of vLLM's sampling parameters
N_LEADING = 2  # columns before the most likely tokens: `logprob`, `sampling_logprob`
MISSING, SAMPLING = -1, -2  # token ids of columns, all different because vLLM's server makes a dict of them
MAX_IMAGES = 64  # number of converted images that are kept for other requests
NAN = 2.0  # stands for NaN, because JSON has none: no log-prob is that large


class SamplerRequest(NamedTuple):
    """The part of an `EngineRequest` that the sampler needs."""

    sampling: SamplingParams
    seed: int
    n_prompt: int


def encode_request(request: EngineRequest) -> dict[str, Any]:
    """Return vLLM's `extra_args` for a request."""
    seed = request.seed % 2**64  # vLLM's messages carry at most 64 bits
    return {REQUEST: {"sampling": asdict(request.sampling), "seed": seed, "n_prompt": len(request.prompt_ids)}}


def decode_request(encoded: dict[str, Any]) -> SamplerRequest:
    """Decode `extra_args[REQUEST]`."""
    sampling: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in encoded["sampling"].items()
    }
    return SamplerRequest(SamplingParams(**sampling), encoded["seed"], encoded["n_prompt"])


def unpack(columns: Sequence[tuple[int, float]]) -> SampledToken:
    """Unpack a sampled token from (token id, log-prob) columns. The first column is the sampled token."""
    (token_id, logprob), *others = ((i, math.nan if value >= NAN else value) for i, value in columns)
    sampling = next((value for i, value in others if i == SAMPLING), None)
    top = {i: value for i, value in others if i >= 0}
    return SampledToken(token_id, logprob, sampling, top or None)


def as_requested(choice: SampledToken, sampling: SamplingParams) -> SampledToken:
    """Return a token of vLLM's own sampler with the log-probs that its request asked for.

    vLLM reports as many most likely tokens as any request of the batch wants.
    """
    top = dict(list((choice.top_logprobs or {}).items())[: sampling.n_top_logprobs])
    return choice._replace(top_logprobs=top or None)


def encode_plan(plan: SyncPlan) -> dict[str, Any]:
    """Convert a plan to plain values."""
    encoded: dict[str, Any] = {field.name: getattr(plan, field.name) for field in fields(plan)}
    specs = [(spec.name, list(spec.shape), str(spec.dtype).removeprefix("torch.")) for spec in plan.specs]
    return encoded | {"specs": specs}


def decode_plan(encoded: Mapping[str, Any], rank: int) -> SyncPlan:
    """Decode a plan for the worker `rank`."""
    specs = tuple(TensorSpec(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in encoded["specs"])
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in encoded.items()}
    return SyncPlan(**plain | {"specs": specs, "rank": encoded["rank"] + rank})


def check_results(results: Sequence[Mapping[str, Any]]) -> None:
    """Raise EngineError if a worker reported an error."""
    for result in results:
        if "error" in result:
            raise EngineError(result["error"])


def decode_receipts(results: Sequence[Mapping[str, Any]]) -> Receipt:
    """Return the receipt that all workers agree on.

    Raise SyncError if a worker did not receive these weights, and EngineError if a worker could not load them.
    """
    for result in results:
        if "sync_error" in result:
            raise SyncError(result["sync_error"])
        if "error" in result:
            raise EngineError(f"vLLM cannot take over the policy's weights: {result['error']}")
    first, *others = [Receipt(*result["receipt"]) for result in results]
    for rank, receipt in enumerate(others, start=1):
        if receipt != first:
            raise SyncError(f"weight sync {first.version}: worker 0 received {first}, worker {rank} {receipt}")
    return first
