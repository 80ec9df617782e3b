"""The vLLM engine in this process."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase
from vllm.config import VllmConfig
from vllm.distributed import cleanup_dist_env_and_memory, model_parallel_is_initialized
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor

from skyrl_train.config.generator import Sampler
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.scheduled import Output, ScheduledEngine
from skyrl_train.inference_engines.sequence import ActiveSequence
from skyrl_train.inference_engines.stepped import EngineFacts, EngineThread, MemoryPart
from skyrl_train.inference_engines.vllm.core import (
    ENVIRONMENT,
    OWN_OPTIONS,
    cannot_run,
    cannot_start,
    core_request,
    create_config,
    read_output,
    starting,
    trial_request,
)
from skyrl_train.inference_engines.vllm.images import load_images
from skyrl_train.inference_engines.vllm.wire import NATIVE_LIMITS, check_results, decode_receipts, encode_plan
from skyrl_train.inference_engines.vllm.worker import read_facts
from skyrl_train.weight_sync import Receipt, SyncPlan


class VLLMEngine(ScheduledEngine):
    """An engine that generates with vLLM in this process, with its own copy of the weights.

    A process can have only one at a time. vLLM caches only full blocks of keys and values, so a partial block's tokens
    are prefilled again.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        executor: ThreadPoolExecutor | None = None,
        sampler: Sampler = "seeded",
    ) -> None:
        """Load a model. This takes seconds to minutes.

        `options` are fields of vLLM's `EngineArgs`. Without `enforce_eager`, compilation threads outlive the engine.
        The `tokenizer` detects stop strings. vLLM runs in the single thread of `executor`, by default a new one. Raise
        EngineError if it cannot start.
        """
        thread = EngineThread(executor, "vllm-engine")
        self._client, config, facts = thread.run_blocking(_start_core, options, tokenizer.eos_token_id, sampler)
        super().__init__(facts, tokenizer, thread)
        self._images = load_images(config, tokenizer)
        self.info = replace(self.info, reads_images=self._images is not None)
        self._sampler = sampler
        self._limits = NATIVE_LIMITS if sampler == "native" else None
        self._aborted: list[str] = []  # not yet removed from vLLM

    async def _exchange(self, new: Mapping[str, ActiveSequence]) -> list[Output]:
        return await self._thread.run(self._run_step, new, self._take_aborted())

    def _run_step(self, new: Mapping[str, ActiveSequence], aborted: list[str]) -> list[Output]:
        self._client.abort_requests(aborted)
        for request_id, sequence in new.items():
            self._client.add_request(core_request(request_id, sequence, self._facts, self._sampler, self._images))
        return [
            read_output(output, self._by_id.get(output.request_id), self._sampler)
            for output in self._client.get_output().outputs
        ]

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._aborted.extend(request_ids)

    def _take_aborted(self) -> list[str]:
        aborted, self._aborted = self._aborted, []
        return aborted

    async def _drop_all(self) -> None:
        await super()._drop_all()
        await self._drop_caches()

    async def _drop_caches(self) -> None:
        """Drop all keys, values and features, and the aborted requests. The remaining requests are prefilled again."""
        await self._thread.run(self._client.abort_requests, self._take_aborted())
        await self._thread.run(partial(self._client.reset_prefix_cache, reset_running_requests=True))
        if self.info.reads_images:
            await self._thread.run(self._client.reset_encoder_cache)

    async def _load_weights(self, plan: SyncPlan) -> Receipt:
        await self._drop_caches()
        call = partial(self._client.collective_rpc, "skyrl_receive_weights", args=(encode_plan(plan),))
        return decode_receipts(await self._thread.run(call))

    async def _release_memory(self) -> None:
        await self._drop_caches()
        if self._facts.can_sleep:
            await self._thread.run(partial(self._client.sleep, level=1))

    async def _restore_memory(self, part: MemoryPart) -> None:
        if self._facts.can_sleep:
            await self._thread.run(self._client.wake_up, [part])

    async def _shut_down(self) -> None:
        await self._thread.run(self._client.shutdown)


def _start_core(
    options: Mapping[str, Any], eos_token_id: int | None, sampler: Sampler
) -> tuple[EngineCoreClient, VllmConfig, EngineFacts]:
    """Start vLLM's engine core in this process, and run a trial step."""
    if model_parallel_is_initialized():
        raise EngineError("this process already has a vLLM engine; call close() on it first")
    with starting({**ENVIRONMENT[sampler], "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}):
        try:
            config = create_config({**OWN_OPTIONS[sampler], "tensor_parallel_size": 1}, options)
            client = EngineCoreClient.make_client(
                multiprocess_mode=False,
                asyncio_mode=False,
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=False,
            )
        except Exception as error:
            cleanup_dist_env_and_memory()
            raise cannot_start(options, error) from error
    facts = read_facts(config, eos_token_id)
    try:
        check_results(client.collective_rpc("skyrl_prepare", args=(sampler, eos_token_id)))
        client.add_request(trial_request(facts, sampler))
        client.get_output()
        client.reset_prefix_cache(reset_running_requests=True)
    except Exception as error:
        client.shutdown()
        raise cannot_run(error) from error
    return client, config, facts
