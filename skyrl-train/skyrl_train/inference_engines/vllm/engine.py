"""The vLLM engine in this process: vLLM schedules, caches and runs the model, and our sampler chooses the tokens."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.inference_engines.scheduled import Output, ScheduledEngine
from skyrl_train.inference_engines.sequence import ActiveSequence
from skyrl_train.inference_engines.stepped import EngineThread, MemoryPart
from skyrl_train.inference_engines.vllm.core import Core
from skyrl_train.weight_sync import Receipt, SyncPlan


class VLLMEngine(ScheduledEngine):
    """An engine that generates with vLLM in this process, with its own copy of the weights.

    A process can have only one at a time. vLLM caches only full blocks of keys and values, so a partial block's tokens
    are prefilled again.
    """

    def __init__(
        self, options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, executor: ThreadPoolExecutor | None = None
    ) -> None:
        """Load a model. This takes seconds to minutes.

        Args:
            options: fields of vLLM's `EngineArgs`. Without `enforce_eager`, compilation threads outlive the engine.
            tokenizer: the policy's tokenizer, used to detect stop strings.
            executor: single-threaded executor that runs vLLM. Created if None.

        Raises:
            EngineError: vLLM cannot start with these options.
        """
        thread = EngineThread(executor, "vllm-engine")
        self._core = thread.run_blocking(Core, options, tokenizer.eos_token_id)
        facts = self._core.facts
        super().__init__(
            context_length=facts.context_length,
            vocab_size=facts.vocab_size,
            eos_ids=frozenset(facts.eos_ids),
            tokenizer=tokenizer,
            thread=thread,
            weight_dtype=facts.weight_dtype,
        )
        self._aborted: list[str] = []  # not yet removed from vLLM

    async def _exchange(self, new: Mapping[str, ActiveSequence]) -> list[Output]:
        return await self._thread.run(self._core.step, new, self._take_aborted())

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._aborted.extend(request_ids)

    async def _drop_all(self) -> None:
        await super()._drop_all()
        await self._thread.run(self._core.reset_cache, self._take_aborted())

    async def _load_weights(self, plan: SyncPlan) -> Receipt:
        return await self._thread.run(self._core.load_weights, plan, self._take_aborted())

    async def _release_memory(self) -> None:
        await self._thread.run(self._core.sleep, self._take_aborted())

    async def _restore_memory(self, part: MemoryPart) -> None:
        await self._thread.run(self._core.wake_up, part)

    async def _shut_down(self) -> None:
        await self._thread.run(self._core.shutdown)

    def _take_aborted(self) -> list[str]:
        aborted, self._aborted = self._aborted, []
        return aborted
