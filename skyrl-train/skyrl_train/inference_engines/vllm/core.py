"""vLLM's engine core in this process: its options, its steps and its weights."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, model_parallel_is_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest
from skyrl_train.inference_engines.base import SamplingParams as OurParams
from skyrl_train.inference_engines.sampling import SampledToken
from skyrl_train.inference_engines.sequence import ActiveSequence, all_eos_ids
from skyrl_train.inference_engines.vllm.sampler import REQUEST, from_columns, install_sampler

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",  # its thread would outlive the engine
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the V2 runner, on GPUs only, calls samplers differently
}
OWN_OPTIONS = {
    "async_scheduling": False,  # the next step starts after the tokens of the last one are known
    "disable_log_stats": True,
    "skip_tokenizer_init": True,
    "speculative_config": None,  # drafts would bypass our sampler
    "tensor_parallel_size": 1,  # in this process
    "use_tqdm_on_load": False,
}


class Output(NamedTuple):
    """The output of a step for one request."""

    request_id: str
    choices: list[SampledToken]
    n_reused: int | None  # prompt tokens taken from the cache; None after the first output
    is_over: bool


class Core:
    """The one vLLM engine core of this process. Use it from a single thread."""

    def __init__(self, options: Mapping[str, Any], eos_token_id: int | None) -> None:
        """Start the core with `options`, fields of vLLM's `EngineArgs`, and the tokenizer's `eos_token_id`.

        Raises:
            EngineError: vLLM does not start with these options.
        """
        if clashes := sorted(OWN_OPTIONS.keys() & options.keys()):
            raise EngineError(f"engine_init_kwargs.{clashes[0]} is set by the engine itself; remove it")
        if model_parallel_is_initialized():
            raise EngineError("this process already has a vLLM engine; call close() on it first")
        with _preserved_process_state():
            try:
                config = EngineArgs(
                    **OWN_OPTIONS, **{"enable_sleep_mode": current_platform.is_sleep_mode_available(), **options}
                ).create_engine_config()
                if config.model_config.is_moe:  # on a CPU, its outputs would be wrong after a weight sync
                    raise ValueError("weight sync does not work for mixtures of experts; use generator.backend=hf")
                self._client = EngineCoreClient.make_client(
                    multiprocess_mode=False,
                    asyncio_mode=False,
                    vllm_config=config,
                    executor_class=Executor.get_class(config),
                    log_stats=False,
                )
            except Exception as error:
                cleanup_dist_env_and_memory()
                raise EngineError(f"vLLM cannot start with {dict(options)}: {error}") from error
        self.context_length = int(config.model_config.max_model_len)
        self.vocab_size = int(config.model_config.get_vocab_size())
        ids = config.model_config.try_get_generation_config().get("eos_token_id")
        self.eos_ids = all_eos_ids(ids, eos_token_id)
        self._can_sleep = bool(config.model_config.enable_sleep_mode)
        try:
            self._client.collective_rpc(install_sampler, args=(self.eos_ids,))
            self._sample_one_token()
        except Exception as error:
            self.shutdown()
            raise EngineError(f"vLLM cannot run this model here, use generator.backend=hf: {error}") from error

    def step(self, new: Mapping[str, ActiveSequence], dropped: list[str]) -> list[Output]:
        """Add `new` requests, remove the dropped ones, and run one step."""
        self._client.abort_requests(dropped)
        for request_id, sequence in new.items():
            self._client.add_request(self._request(request_id, sequence.request, sequence.max_tokens))
        return [_output(output) for output in self._client.get_output().outputs]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], dropped: list[str]) -> None:
        """Load new weights. The remaining requests read their tokens again.

        Raises:
            EngineError: the names do not fit the model.
        """
        self.forget(dropped)
        try:
            (missing,) = self._client.collective_rpc(_load_weights, args=(weights,))
        except Exception as error:
            raise EngineError(f"vLLM cannot take over the policy's weights: {error}") from error
        if missing:
            raise EngineError(
                f"the policy has no tensor for {min(missing)} and {len(missing) - 1} other parameters of vLLM's model; "
                "they would keep old values, so use generator.backend=hf for this architecture"
            )

    def forget(self, dropped: list[str]) -> None:
        """Drop all keys and values, and some requests; the others are read again."""
        self._client.abort_requests(dropped)
        self._client.reset_prefix_cache(reset_running_requests=True)

    def sleep(self, dropped: list[str]) -> None:
        """Release the device's memory where vLLM can, which excludes CPUs."""
        self.forget(dropped)
        if self._can_sleep:
            self._client.sleep(level=1)

    def wake_up(self) -> None:
        """Undo `sleep`."""
        if self._can_sleep:
            self._client.wake_up()

    def shutdown(self) -> None:
        """Release everything."""
        self._client.shutdown()

    def _sample_one_token(self) -> None:
        """Check that the model runs: some load and fail in their first step."""
        self._client.add_request(self._request("trial", EngineRequest([0], OurParams(max_new_tokens=1), seed=0), 2))
        self._client.get_output()
        self.forget([])

    def _request(self, request_id: str, request: EngineRequest, max_tokens: int) -> EngineCoreRequest:
        sampling = request.sampling
        params = SamplingParams(
            max_tokens=max_tokens - len(request.prompt_ids),
            stop_token_ids=[*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_ids)],
            logprobs=0,  # returns everything that our sampler reports
            detokenize=False,
            extra_args={REQUEST: request},
        )
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(request.prompt_ids),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )


def _output(output: EngineCoreOutput) -> Output:
    stats = output.prefill_stats
    return Output(
        output.request_id,
        [] if output.new_logprobs is None else from_columns(output.new_logprobs),
        None if stats is None else stats.num_cached_tokens,
        output.finish_reason is not None,
    )


@torch.no_grad()
def _load_weights(worker: WorkerBase, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy tensors, named as in a checkpoint, into the model of a worker; return the names of parameters without one.

    vLLM fuses projections and, on a CPU, keeps packed copies of them. Reloading layer by layer rebuilds both.
    """
    model = worker.model_runner.get_model()
    names = {name for name, _ in model.named_parameters()}
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        try:
            loaded: set[str] = model.load_weights(weights)
        finally:
            finalize_layerwise_reload(model, worker.model_config)
        for module in model.modules():  # on a CPU, a head tied to the embedding has a packed copy, too
            if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
                module.quant_method.process_weights_after_loading(module)
    return names - loaded


@contextmanager
def _preserved_process_state() -> Iterator[None]:
    """Undo what starting vLLM changes in the process that it shares with the trainer.

    It seeds every random generator, sets environment variables that child processes would inherit (LD_PRELOAD among
    them), and on a CPU replaces `torch.set_num_threads`.
    """
    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    python_state, numpy_state = random.getstate(), np.random.get_state()
    os.environ.update(ENVIRONMENT)
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
