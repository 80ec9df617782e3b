"""The embedded engine: an asyncio front, and one step loop over a Hugging Face model.

A step is one forward pass: one token of every running sequence, and as many tokens of new prompts as its budget has
left. Sequences join and leave between steps. What a session, or any other sequence, has stored of a prompt is not read
again.

Only the forward pass runs in a thread; requests, regions and sessions belong to the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, OnTokens
from skyrl_train.inference_engines.hf.attention import PackedCache, packed
from skyrl_train.inference_engines.hf.head import Head
from skyrl_train.inference_engines.hf.kv_memory import UNIT, KVMemory
from skyrl_train.inference_engines.hf.region_table import RegionTable
from skyrl_train.inference_engines.hf.sampling import Choice, Draw, choose_tokens
from skyrl_train.inference_engines.hf.scheduler import Scheduler, Step
from skyrl_train.inference_engines.hf.sequence import Call
from skyrl_train.inference_engines.hf.sequence import Sequence as Sampled
from skyrl_train.inference_engines.hf.stopping import StopRules
from skyrl_train.models.loading import autocast

logger = logging.getLogger(__name__)


class HFEngine:
    """Generates with the tensors of `model` itself: a weight update needs no copy, only a new version number."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_cache_bytes: int,
        bf16: bool = False,
    ) -> None:
        """`max_num_seqs` sequences run at once; their keys and values take at most `max_cache_bytes`.

        Raises:
            EngineError: the model's attention is not one that the engine can replace.
        """
        _check_attention(model)
        self._model = model
        self._bf16 = bf16
        self.context_length = int(model.config.get_text_config().max_position_embeddings)
        self._rules = StopRules(model, tokenizer)
        self._head = Head(model)
        self._bytes_per_token = _cache_bytes_per_token(model)
        self._max_cache_bytes = max_cache_bytes
        size = max_cache_bytes // self._bytes_per_token // UNIT * UNIT
        self._memory = KVMemory(size)
        self._table = RegionTable(size)
        self._scheduler = Scheduler(self._table, max_num_seqs, max_num_batched_tokens)
        self._weight_version = 0
        self._is_paused = False
        self._loop_task: asyncio.Task[None] | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-engine")

    async def generate(
        self, requests: Sequence[EngineRequest], on_tokens: OnTokens | None = None
    ) -> list[EngineResult]:
        """See `InferenceEngine.generate`."""
        if not requests:
            return []
        done = asyncio.get_running_loop().create_future()
        call = Call([None] * len(requests), len(requests), done, on_tokens)
        self._scheduler.waiting.extend([self._sequence(r, call, index) for index, r in enumerate(requests)])
        self._start_loop()
        await done
        return [result for result in call.results if result is not None]

    def abort(self, session_id: str | None = None) -> None:
        """See `InferenceEngine.abort`."""
        for sequence in self._unfinished():
            if session_id is None or sequence.request.session_id == session_id:
                sequence.stop_reason = "abort"
        self._start_loop()

    async def pause(self) -> None:
        """See `InferenceEngine.pause`."""
        if self._is_paused:
            raise EngineError("the engine is paused already; whoever paused it must resume it first")
        self._is_paused = True
        await self._last_step()

    def resume(self) -> None:
        """See `InferenceEngine.resume`."""
        if not self._is_paused:
            raise EngineError("the engine is not paused")
        self._is_paused = False
        self._start_loop()

    def end_session(self, session_id: str) -> None:
        """See `InferenceEngine.end_session`."""
        self._table.end_session(session_id)

    async def sync_weights(self, weight_version: int) -> None:
        """See `InferenceEngine.sync_weights`. The tensors are the policy's own: only caches are dropped."""
        n_unfinished = len(self._unfinished())
        if n_unfinished and not self._is_paused:
            raise EngineError(
                f"weights changed to version {weight_version} while {n_unfinished} sequences were being generated; "
                "pause() the engine first, or wait for generate() to return"
            )
        await self._last_step()  # of calls that were cancelled
        self._forget()  # computed with other weights; while the policy trains, their memory is its to use
        self._weight_version = weight_version

    async def sleep(self) -> None:
        """See `InferenceEngine.sleep`."""
        if n_unfinished := len(self._unfinished()):
            raise EngineError(f"the engine cannot sleep while {n_unfinished} sequences are being generated")
        await self._last_step()
        self._forget()

    async def wake_up(self) -> None:
        """See `InferenceEngine.wake_up`. Memory is taken when it is written."""

    async def close(self) -> None:
        """See `InferenceEngine.close`."""
        if self._loop_task is not None and not self._loop_task.done():
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        self._executor.shutdown(wait=True)  # the step it is in still needs the memory
        self._fail(EngineError("the engine was closed while requests were waiting"))

    # -- the step loop

    def _start_loop(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run())

    async def _last_step(self) -> None:
        """Wait until no step is running; the loop ends by itself when it is paused or has nothing to do."""
        if self._loop_task is not None and not self._loop_task.done():
            await asyncio.wait([self._loop_task])

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._has_work():
            try:
                step = self._scheduler.next_step()
                choices = await loop.run_in_executor(self._executor, self._forward, step)
                self._take(step, choices)
            except Exception as error:  # the boundary of a request: every caller learns why, and the engine goes on
                logger.exception("A generation step failed")
                self._fail(error if isinstance(error, EngineError) else EngineError(f"generation failed: {error!r}"))

    def _has_work(self) -> bool:
        """Hand out what is complete, drop what nobody waits for any more; whether there is a step to do."""
        for sequence in self._scheduler.take_finished():
            if sequence.stop_reason is not None:
                sequence.call.deliver(sequence.index, sequence.result())
        return not self._is_paused and bool(self._scheduler.running or self._scheduler.waiting)

    @torch.inference_mode()
    def _forward(self, step: Step) -> list[Choice]:
        """One forward pass; the next token of every sequence that has read all it has, in the order of the rows."""
        self._memory.copy(step.copies)
        device = self._model.device
        cache = PackedCache(self._memory, step.rows, device)
        new_ids = [row.sequence.token_ids[row.sequence.n_cached :][: row.n_new] for row in step.rows]
        input_ids = torch.tensor(list(chain.from_iterable(new_ids)), device=device)  # (N,)
        ends = torch.tensor([row.n_new for row in step.rows]).cumsum(0) - 1
        is_complete = torch.tensor([row.is_complete for row in step.rows])
        with autocast(device, self._bf16), packed(self._model):
            hidden = self._model.base_model(
                input_ids=input_ids[None],
                position_ids=cache.position_ids[None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[0]  # (N, H)
            hidden = hidden[ends[is_complete].to(device)]  # (b, H)
            draws = [self._draw(row.sequence) for row in step.rows if row.is_complete]
            n_rows = self._head.max_rows
            return [
                choice
                for i in range(0, len(draws), n_rows)
                for choice in choose_tokens(self._head.logits(hidden[i : i + n_rows]), draws[i : i + n_rows])
            ]

    def _draw(self, sequence: Sampled) -> Draw:
        return Draw(
            sequence.sampling, sequence.request.seed, sequence.token_ids, sequence.n_prompt, self._rules.eos_ids
        )

    def _take(self, step: Step, choices: Sequence[Choice]) -> None:
        """Note what was read and sampled."""
        sampled = iter(choices)
        for row in step.rows:
            sequence, is_complete = row.sequence, row.is_complete
            assert sequence.region is not None
            sequence.region.n_cached += row.n_new
            if not is_complete:
                continue
            choice = next(sampled)
            if not math.isfinite(choice.logprob):
                raise EngineError(
                    f"the model's logits are not finite (weight version {self._weight_version}): the policy has "
                    "diverged; resume from an earlier checkpoint with a lower learning rate"
                )
            sequence.append(choice, self._weight_version)
            sequence.stop_reason = self._rules.stop_reason(sequence) or sequence.stop_reason
            sequence.tell()

    # -- requests and results

    def _sequence(self, request: EngineRequest, call: Call, index: int) -> Sampled:
        n_prompt = len(request.prompt_ids)
        if not 0 < n_prompt < self.context_length:
            raise EngineError(
                f"a prompt of {n_prompt} tokens: this model takes between 1 and {self.context_length - 1}; lower "
                "generator.max_input_length or shorten the prompt"
            )
        max_tokens = min(n_prompt + request.sampling.max_new_tokens, self.context_length)
        if -(-max_tokens // UNIT) * UNIT > self._memory.size:
            raise EngineError(
                f"a sequence of {max_tokens} tokens needs {max_tokens * self._bytes_per_token:,} bytes of key-value "
                f"cache and {self._max_cache_bytes:,} are allowed; raise generator.gpu_memory_utilization or lower "
                "generator.max_input_length or sampling_params.max_generate_length"
            )
        return Sampled(request, call, index, max_tokens, list(request.prompt_ids))

    def _unfinished(self) -> list[Sampled]:
        held: Iterable[Sampled] = chain(self._scheduler.running, self._scheduler.waiting)
        return [sequence for sequence in held if not sequence.is_over]

    def _fail(self, error: EngineError) -> None:
        """Tell everyone who waits, and start over with empty memory."""
        for sequence in self._unfinished():
            if not sequence.call.done.done():
                sequence.call.done.set_exception(error)
        self._scheduler.running = []
        self._scheduler.waiting = deque()
        self._forget()

    def _forget(self) -> None:
        """Drop all keys and values; sequences that still run are read again."""
        self._scheduler.restart_all()
        self._memory.release()
        self._head.release()


def _check_attention(model: PreTrainedModel) -> None:
    if not model._supports_attention_backend:
        raise EngineError(
            f"the embedded engine cannot run {type(model).__name__}, whose attention is its own; use "
            "generator.backend=vllm"
        )


def _cache_bytes_per_token(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    n_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * n_heads * head_dim * model.dtype.itemsize
