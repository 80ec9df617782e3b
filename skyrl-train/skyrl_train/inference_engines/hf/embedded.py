"""Base class of the embedded engine: a Hugging Face model that may share the policy's tensors."""

import logging
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import EngineError, OutOfMemoryError
from skyrl_train.inference_engines.base import EngineInfo, EngineRequest
from skyrl_train.inference_engines.sampling import Draw, SampledToken, choose_in_chunks
from skyrl_train.inference_engines.sequence import ActiveSequence, all_eos_ids
from skyrl_train.inference_engines.stepped import EngineFacts, EngineThread, MemoryPart, SteppedEngine
from skyrl_train.media.processing import has_vision
from skyrl_train.models.linear_head import linear_head_logits
from skyrl_train.models.logprobs import lm_head_logits, scaled_logits
from skyrl_train.models.lora import trained_parameters
from skyrl_train.models.offload import OffloadedTensors, release_cached_memory
from skyrl_train.out_of_memory import describe_memory, describe_shortage, free_references
from skyrl_train.weight_sync import Receipt, Receiver, SyncPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DrawnSequence(ActiveSequence):
    """A sequence whose next token depends on its draw."""

    draw: Draw = field(init=False)


S = TypeVar("S", bound=DrawnSequence)


@dataclass(slots=True)
class StepLimits:
    """The limits of a step of generation."""

    n_sequences: int
    n_tokens: int

    def halve(self, n_sequences: int, n_tokens: int, min_tokens: int) -> bool:
        """Exclude a step of `n_tokens`, in which `n_sequences` were active. Return False if no step is smaller.

        While the step read prompts, they are read in smaller pieces. After that, fewer sequences run at once.
        """
        if n_tokens > n_sequences and (fewer := min(self.n_tokens, n_tokens) // 2) >= min_tokens:
            self.n_tokens = fewer
        elif n_sequences > 1:
            self.n_sequences = n_sequences // 2
        else:
            return False
        return True


class EmbeddedEngine(SteppedEngine[S]):
    """An engine that generates with the tensors of `model`. If a trainer updates them, a sync only sets the version.

    Subclasses differ in how they run the model and store what it remembers of a sequence.
    """

    sequence_type: type[S]
    unit = 1  # tokens by which the memory of a sequence grows

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_cache_bytes: int,
        bf16: bool = False,
        executor: ThreadPoolExecutor | None = None,
        owns_model: bool = False,
        records_experts: bool = False,
    ) -> None:
        """Run at most `max_num_seqs` sequences at once, whose caches take at most `max_cache_bytes` in all.

        The model runs in the single thread of `executor`. By default, the engine starts a thread. With `owns_model`,
        the weights move to host memory while the engine sleeps. With `records_experts`, results include the
        experts chosen for each token. Raise ConfigError if the model has no experts to record, and EngineError
        if the engine cannot run the model.
        """
        ids = model.generation_config.eos_token_id if model.generation_config is not None else None
        config, eos_ids = model.config.get_text_config(), all_eos_ids(ids, tokenizer.eos_token_id)
        facts = EngineFacts(int(config.max_position_embeddings), int(config.vocab_size), sorted(eos_ids))
        super().__init__(facts, tokenizer, EngineThread(executor, "hf-engine"))
        self._step_limits = StepLimits(max_num_seqs, max_num_batched_tokens)
        self._n_step_tokens = 0  # that the current step reads
        self._max_cache_bytes = max_cache_bytes
        self._model = model
        self._bf16 = bf16
        self._head = Head(model)
        self._owns_model = owns_model
        self._records_experts = records_experts
        self._offloaded: OffloadedTensors | None = None  # the weights, while the engine sleeps
        self._bytes_per_row, self._bytes_per_token = self._thread.run_blocking(self._probe)
        n_tokens = (
            max(0, max_cache_bytes - self._bytes_per_row) // max(1, self._bytes_per_token) // self.unit * self.unit
        )
        longest_sequence = min(self.info.context_length, n_tokens)
        self.info = EngineInfo(self.info.context_length, longest_sequence, reads_images=has_vision(model.config))
        self._create_cache(n_tokens)

    @abstractmethod
    def _probe(self) -> tuple[int, int]:
        """Return bytes of cache per sequence and per token. Raise EngineError if the model fails a short test."""

    @abstractmethod
    def _create_cache(self, n_tokens: int) -> None:
        """Create the cache of at most `n_tokens`."""

    def _restart_all(self) -> None:
        """Drop everything that the model remembers of the sequences. They wait, and are prefilled again."""
        self._queue.restart_all()

    async def _retry_smaller(self, error: Exception) -> Exception | None:
        """Restart all sequences with smaller steps. Their samples do not change, as each token has its own draw."""
        n_sequences = len(self._queue.running)
        text = (
            f"generation ran out of memory in a step of {self._n_step_tokens:,} tokens, with {n_sequences} running "
            f"{'sequence' if n_sequences == 1 else 'sequences'} ({describe_memory()}): {describe_shortage(error)}"
        )
        free_references(error)
        self._drop_caches()
        await self._thread.run(release_cached_memory, self._model.device)
        if (reduced := self._reduce(n_sequences)) is None:
            return OutOfMemoryError(f"{text}. One sequence alone does not fit", "generate")
        logger.warning(
            "%s. It is repeated with %s, for the rest of the run. Samples do not change",
            *(text[0].upper() + text[1:], reduced),
        )
        return None

    def _reduce(self, n_sequences: int) -> str | None:
        """Halve the limits of steps after one with `n_sequences`. Return their settings, or None if none is smaller."""
        if not self._step_limits.halve(n_sequences, self._n_step_tokens, self.unit):
            return None
        limits = self._step_limits
        return f"generator.max_num_seqs={limits.n_sequences} and generator.max_num_batched_tokens={limits.n_tokens}"

    def _n_bytes(self, n_rows: int, n_tokens: int) -> int:
        """Return the bytes of cache for sequences of `n_tokens`."""
        return n_rows * (self._bytes_per_row + n_tokens * self._bytes_per_token)

    def _new_sequence(self, request: EngineRequest, max_tokens: int) -> S:
        if max_tokens > self.info.longest_sequence:
            raise EngineError(
                f"a sequence of {max_tokens} tokens needs {self._n_bytes(1, max_tokens):,} bytes of key-value cache "
                f"but only {self._max_cache_bytes:,} are available; raise generator.gpu_memory_utilization or lower "
                "generator.max_input_length or sampling_params.max_generate_length"
            )
        sequence = self.sequence_type(request, max_tokens)
        sequence.draw = Draw(request.sampling, request.seed, sequence.token_ids, sequence.n_prompt, self._eos_ids)
        return sequence

    async def _drop_all(self) -> None:
        self._queue.clear()
        self._drop_caches()

    async def _load_weights(self, plan: SyncPlan) -> Receipt:
        self._restart_all()  # before the transfer, because a failed one leaves some new weights
        return await self._thread.run(self._copy_weights, plan)

    @torch.no_grad()
    def _copy_weights(self, plan: SyncPlan) -> Receipt:
        """Copy weights into the model, except tensors that share the policy's memory."""
        parameters = trained_parameters(self._model) if plan.kind == "adapter" else dict(self._model.named_parameters())
        receiver = Receiver(plan, into=parameters)
        received = set()
        for name, tensor in receiver:
            if name not in parameters or parameters[name].shape != tensor.shape:
                shape = tuple(parameters[name].shape) if name in parameters else "none"
                raise EngineError(
                    f"the policy sends {name} of shape {tuple(tensor.shape)} but the engine's model has {shape}; "
                    "load the engine from the policy's folder"
                )
            received.add(name)
            if parameters[name].data_ptr() != tensor.data_ptr():
                parameters[name].copy_(tensor)
        if missing := sorted(parameters.keys() - received):
            raise EngineError(f"the policy has no {missing[0]} ({len(missing)} tensors in all) for the engine's model")
        return receiver.receipt

    async def _release_memory(self) -> None:
        self._drop_caches()
        if self._owns_model:
            await self._thread.run(self._offload)
        else:
            await self._thread.run(release_cached_memory, self._model.device)

    def _offload(self) -> None:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        self._offloaded = OffloadedTensors(tensors, self._model.device)
        release_cached_memory(self._model.device)

    async def _restore_memory(self, part: MemoryPart) -> None:
        if part == "weights" and self._offloaded is not None:
            await self._thread.run(self._offloaded.restore)
            self._offloaded = None

    async def _shut_down(self) -> None:
        self._drop_caches()

    def _drop_caches(self) -> None:
        self._restart_all()
        self._head.release()

    def _choose_tokens(self, states: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
        """Sample the token after each hidden state (b, H)."""
        return choose_in_chunks(draws, self._head.n_tokens, lambda rows: self._head.logits(states[rows]))


class Head:
    """A model's language-model head that reuses one block of memory for the logits of every step.

    With a vocabulary of 150,000, a step's logits take tens of megabytes, and on a CPU, allocating them takes as long
    as computing them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.n_tokens: int = model.get_output_embeddings().weight.shape[0]
        self._memory: torch.Tensor | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits (b, V) of hidden states (b, H), valid until the next call. Callers may change them."""
        head = self._model.get_output_embeddings()
        if type(head) is not torch.nn.Linear or hidden.device.type != "cpu":
            return lm_head_logits(self._model, hidden)
        if self._memory is None or len(self._memory) < len(hidden):
            self._memory = torch.empty(len(hidden), self.n_tokens)
        out = linear_head_logits(hidden, head.weight, head.bias, self._memory[: len(hidden)])
        return scaled_logits(self._model, out)

    def release(self) -> None:
        """Release the memory."""
        self._memory = None
