"""vLLM in this process, or in others: an engine core that steps on its own, and workers that share the model.

Both use the same core clients as vLLM itself, but without its tokenizers, because requests and results are tokens.
"""

import asyncio
import math
import os
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase
from vllm.config import VllmConfig
from vllm.distributed import cleanup_dist_env_and_memory, model_parallel_is_initialized
from vllm.platforms import current_platform
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from skyrl_train.config.generator import Sampler
from skyrl_train.errors import EngineError, EngineLostError
from skyrl_train.inference_engines.scheduled import AsyncEngine, Output, ScheduledEngine
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

T = TypeVar("T")

POLL_S = 1.0
DIED = "vLLM's process ended; see its output above"
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


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


class AsyncVLLMEngine(AsyncEngine):
    """An engine that runs vLLM in other processes, on one or more devices. Create it in the event loop that uses it."""

    def __init__(
        self, options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, sampler: Sampler = "seeded"
    ) -> None:
        """Start the processes and load a model. This takes seconds to minutes.

        `options` are fields of vLLM's `EngineArgs`. The `tokenizer` detects stop strings. Raise EngineError if this
        machine has too few GPUs, or vLLM cannot start with these options.
        """
        n_devices = math.prod(int(options.get(name, 1)) for name in PARALLEL_SIZES)
        if current_platform.is_cuda_alike() and n_devices > (n_gpus := torch.cuda.device_count()):
            sizes = " × ".join(f"{name}={options[name]}" for name in PARALLEL_SIZES if options.get(name, 1) > 1)
            raise EngineError(
                f"vLLM needs {n_devices} GPUs for {sizes}, but this process sees only {n_gpus}; lower "
                "generator.inference_engine_tensor_parallel_size, or give the engine more GPUs"
            )
        environment = {
            **ENVIRONMENT[sampler],
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        own = dict(OWN_OPTIONS[sampler])
        if n_devices > 1:
            own["distributed_executor_backend"] = "mp"  # in a Ray actor, vLLM would start more actors elsewhere
            if current_platform.is_cpu():  # vLLM binds each worker to a separate NUMA node and fails with fewer nodes
                n_threads = max(1, torch.get_num_threads() // n_devices)
                environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(n_threads)}
        with starting(environment):
            try:
                config = create_config(own, options)
                self._client = EngineCoreClient.make_async_mp_client(
                    config, Executor.get_class(config), log_stats=False
                )
            except Exception as error:
                raise cannot_start(options, error) from error
        facts = read_facts(config, tokenizer.eos_token_id)
        super().__init__(facts, tokenizer, EngineThread(None, "vllm-engine"))
        self._images = load_images(config, tokenizer)
        self.info = replace(self.info, reads_images=self._images is not None)
        self._eos_token_id, self._sampler = tokenizer.eos_token_id, sampler
        self._limits = NATIVE_LIMITS if sampler == "native" else None
        self._reading: asyncio.Task[None] | None = None

    async def _submit_to_backend(self, new: Mapping[str, ActiveSequence]) -> None:
        if self._reading is None:  # install the sampler, and run a trial step
            check_results(await self._call_workers("skyrl_prepare", self._sampler, self._eos_token_id, os.getpid()))
            try:
                await self._client.add_request_async(trial_request(self._facts, self._sampler))
                await self._client.get_output_async()
            except Exception as error:
                raise cannot_run(error) from error
            self._reading = asyncio.create_task(self._read())
        for request_id, sequence in new.items():
            core = core_request(request_id, sequence, self._facts, self._sampler, self._images)
            await self._ask(self._client.add_request_async(core))

    async def _read(self) -> None:
        """Queue the engine core's outputs until the core exits."""
        try:
            while True:
                for output in (await self._client.get_output_async()).outputs:
                    sequence = self._by_id.get(output.request_id)
                    self._outputs.put_nowait(read_output(output, sequence, self._sampler))
        except EngineDeadError:
            self._outputs.put_nowait(EngineLostError(DIED))
        except Exception as error:  # noqa: BLE001, fails the waiting requests
            self._outputs.put_nowait(error)

    async def check_health(self) -> None:
        await super().check_health()
        try:
            self._client.ensure_alive()
        except EngineDeadError as error:
            raise EngineLostError(DIED) from error

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._start_abort(self._client.abort_requests_async(list(request_ids)))

    async def _drop_all(self) -> None:
        await super()._drop_all()
        await self._drop_caches()

    async def _drop_caches(self) -> None:
        await self._wait_for_aborts()
        await self._ask(self._client.reset_prefix_cache_async(reset_running_requests=True))
        if self.info.reads_images:
            await self._ask(self._client.reset_encoder_cache_async())

    async def _load_weights(self, plan: SyncPlan) -> Receipt:
        await self._drop_caches()
        return decode_receipts(await self._call_workers("skyrl_receive_weights", encode_plan(plan)))

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all workers and return the results in rank order.

        Raise EngineLostError if a worker has ended. vLLM then ends all workers.
        """
        try:
            results = await self._ask(self._client.call_utility_all_async("collective_rpc", method, None, args, None))
        except EngineLostError:
            raise
        except Exception as error:  # vLLM raises plain exceptions
            self._broken_by = EngineLostError(f"a vLLM worker ended during {method}; see its output above")
            raise self._broken_by from error
        return [result for replica in results for result in replica]

    async def _ask(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call to the engine core, or raise EngineLostError if the core ends. vLLM would wait forever."""
        answer = asyncio.ensure_future(call)
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=POLL_S)
                if not answer.done():
                    self._client.ensure_alive()
            return answer.result()
        except EngineDeadError as error:
            raise EngineLostError(DIED) from error
        finally:
            answer.cancel()

    async def _release_memory(self) -> None:
        await self._drop_caches()
        if self._facts.can_sleep:
            await self._ask(self._client.sleep_async(level=1))

    async def _restore_memory(self, part: MemoryPart) -> None:
        if self._facts.can_sleep:
            await self._ask(self._client.wake_up_async([part]))

    async def _shut_down(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._wait_for_aborts()
        await self._thread.run(self._client.shutdown)
