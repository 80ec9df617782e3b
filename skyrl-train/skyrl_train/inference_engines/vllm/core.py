"""Options, requests and outputs of vLLM's engine core, in this process or in another.

Tokens are chosen by one of two samplers:

- `seeded` is ours (`sampler.py`). Tokens depend only on the seed and the position, and log-probs are known under
  truncation and penalties too.
- `native` is vLLM's, with asynchronous scheduling and the current model runner on GPUs. It has no seeds, and it reports
  only log-probs of the distribution that it samples from. They equal the policy's unless tokens are truncated or
  penalized.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from skyrl_train.config.generator import Sampler
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest
from skyrl_train.inference_engines.base import SamplingParams as OurParams
from skyrl_train.inference_engines.scheduled import Output
from skyrl_train.inference_engines.sequence import ActiveSequence
from skyrl_train.inference_engines.stepped import EngineFacts
from skyrl_train.inference_engines.vllm.sampler import from_columns
from skyrl_train.inference_engines.vllm.wire import EXTENSION, NATIVE_LOGPROBS, as_requested, encode_request
from skyrl_train.media.processing import is_vision_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from skyrl_train.inference_engines.vllm.images import RequestImages

NO_USAGE_STATS = {"VLLM_NO_USAGE_STATS": "1"}  # its thread would outlive the engine
ENVIRONMENT: Mapping[Sampler, Mapping[str, str]] = {
    "native": NO_USAGE_STATS,
    # The V2 runner, on GPUs only, calls samplers differently.
    "seeded": NO_USAGE_STATS | {"VLLM_USE_V2_MODEL_RUNNER": "0"},
}
COMMON_OPTIONS = {
    "disable_log_stats": True,
    "speculative_config": None,  # drafts bypass our sampler, and make vLLM's report NaN
    "use_tqdm_on_load": False,
    "worker_extension_cls": EXTENSION,
}
OWN_OPTIONS: Mapping[Sampler, Mapping[str, Any]] = {
    "native": COMMON_OPTIONS | {"logprobs_mode": NATIVE_LOGPROBS},
    # Our sampler needs the last step's tokens before the next step.
    "seeded": COMMON_OPTIONS | {"async_scheduling": False},
}


def create_config(own: Mapping[str, Any], options: Mapping[str, Any]) -> VllmConfig:
    """Create vLLM's configuration. EngineError if the user's `options` set one of our `own`."""
    if clashes := sorted(own.keys() & options.keys()):
        raise EngineError(f"engine_init_kwargs.{clashes[0]} is set by the engine itself; remove it")
    options = {"enable_sleep_mode": current_platform.is_sleep_mode_available(), **options}
    own = {**own, "skip_tokenizer_init": not is_vision_model(str(options["model"]))}  # images need vLLM's
    return EngineArgs(**own, **options).create_engine_config()


def cannot_start(options: Mapping[str, Any], error: Exception) -> EngineError:
    """Return the error for an engine that did not start."""
    return error if isinstance(error, EngineError) else EngineError(f"vLLM cannot start with {dict(options)}: {error}")


def cannot_run(error: Exception) -> EngineError:
    """Return the error for an engine that failed in its first step."""
    return EngineError(f"vLLM cannot run this model here; use generator.backend=hf: {error}")


def core_request(
    request_id: str, sequence: ActiveSequence, facts: EngineFacts, sampler: Sampler, images: RequestImages | None = None
) -> EngineCoreRequest:
    """Return the vLLM request that continues a sequence after its tokens so far."""
    sampling = sequence.sampling
    choice: dict[str, Any] = {"temperature": sampling.temperature, "logprobs": sampling.n_top_logprobs}
    if sampler == "seeded":  # with logprobs, vLLM returns the columns of our sampler
        choice = {"logprobs": 0, "extra_args": encode_request(sequence.request)}
    params = SamplingParams(
        max_tokens=sequence.max_tokens - len(sequence.token_ids),
        stop_token_ids=[*sampling.stop_token_ids, *(() if sampling.ignore_eos else facts.eos_ids)],
        detokenize=False,
        **choice,
    )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(sequence.token_ids) if images is None else images.tokens(sequence),
        mm_features=images.features(sequence) if images is not None else None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def trial_request(facts: EngineFacts, sampler: Sampler) -> EngineCoreRequest:
    """Return a request for one token. Some models load but fail in their first step."""
    request = EngineRequest([0], OurParams(max_new_tokens=1), seed=0)
    return core_request("trial", ActiveSequence(request, 2), facts, sampler)


def read_output(output: EngineCoreOutput, sequence: ActiveSequence | None, sampler: Sampler) -> Output:
    """Convert vLLM's output for a request. `sequence` is None if we no longer track the request."""
    stats = output.prefill_stats
    choices = [] if output.new_logprobs is None else from_columns(output.new_logprobs)
    if sampler == "native" and sequence is not None:
        choices = [as_requested(choice, sequence.sampling) for choice in choices]
    return Output(
        output.request_id, choices, None if stats is None else stats.num_cached_tokens, output.finish_reason is not None
    )


@contextmanager
def starting(environment: Mapping[str, str]) -> Iterator[None]:
    """Set the variables in `environment` while vLLM starts, and undo what vLLM changes in this process.

    vLLM seeds all random generators, sets environment variables that child processes would inherit (such as
    LD_PRELOAD), and on a CPU replaces `torch.set_num_threads`.
    """
    before, set_num_threads = dict(os.environ), torch.set_num_threads
    python_state, numpy_state = random.getstate(), np.random.get_state()
    os.environ.update(environment)
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
