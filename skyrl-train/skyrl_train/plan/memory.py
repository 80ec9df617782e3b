"""The memory of a run by phase and part, computed before anything is loaded.

A part is one kind of values, such as the gradients of the policy. A phase is a stage of the run. On a machine without
GPUs, everything is in host memory. All sizes are bytes.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PretrainedConfig

from skyrl_train.config.supervised import DPOTrainerConfig, SupervisedConfig
from skyrl_train.models.linear_head import CPU_BLOCK, GPU_LOGITS, MAX_SAVED_BYTES
from skyrl_train.models.memory import (
    CACHE_UNIT,
    activation_bytes_per_token,
    config_cache_bytes_per_token,
    default_max_tokens,
    pass_bytes_per_token,
)
from skyrl_train.models.prefix_sharing import SHARED_COST
from skyrl_train.models.quantization import MAX_FREED_BYTES
from skyrl_train.plan.forecast import PlannedModel
from skyrl_train.plan.hardware import Hardware
from skyrl_train.plan.run_plan import RunPlan, TrainingPlan

Phase = Literal["load", "rollout", "score", "update", "sync", "save"]
PHASES: tuple[Phase, ...] = ("load", "rollout", "score", "update", "sync", "save")
Place = Literal["device", "host"]

PROCESS_BYTES = {"cpu": 570e6, "cuda": 3e9}
"""Host memory of a process with all libraries, on a CPU (measured) and with CUDA (typical)."""
ENGINE_PROCESS_BYTES = 500e6
KERNEL_BYTES = 50e6
"""What the compiled kernels of a model in bfloat16 take on a CPU."""
CONTEXT_BYTES = 600e6
"""Memory that CUDA takes on a GPU for each process."""
FRAGMENTATION = {"cpu": 0.32, "cuda": 0.05}
"""Temporary memory that the allocator cannot reuse, as a share of the rest. Fitted to runs on a CPU with glibc 2.36."""
HEAD_BLOCK_BYTES = {"cpu": 2 * 4 * math.prod(CPU_BLOCK), "cuda": 2 * 4 * GPU_LOGITS}
HUGE_PAGE_BYTES = 1 << 21  # pages in which Linux provides a large array of NumPy
CACHE = "engine: key-value cache"
FILES = "weight files"
TURN_TOKENS = 64
"""Assumed length of an environment's reply between two turns."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One kind of values in memory."""

    name: str
    place: Place
    phases: Mapping[Phase, float]
    """Bytes by phase, 0 if missing."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The size of a mini-batch on one rank, and of the micro-batches it is computed in.

    The samples of a group share their prompt, which is computed once per micro-batch. In `workers.split`, another
    sample's copy costs `SHARED_COST` of its tokens. Here, 4 prompts with 4 answers each have 1,892 tokens that cost
    2,543, so they need two micro-batches:

    >>> rows = Rows(n_prompts=4, n_samples=4, prompt_tokens=217, row_tokens=281, budget=1941)
    >>> rows.n_tokens, rows.n_passes, rows.micro_batch_tokens, rows.later_tokens
    (1892, 2, 1364, 745)
    """

    n_prompts: int
    n_samples: int
    prompt_tokens: int
    row_tokens: int  # with the prompt
    budget: int  # cost of a micro-batch

    @property
    def answer_tokens(self) -> int:
        """Tokens of all answers."""
        return self.n_prompts * self.n_samples * (self.row_tokens - self.prompt_tokens)

    @property
    def n_tokens(self) -> int:
        """Computed tokens: each prompt counts once."""
        return self.n_prompts * self.prompt_tokens + self.answer_tokens

    @property
    def n_passes(self) -> int:
        """Minimum number of micro-batches."""
        return max(1, math.ceil(self._cost / self.budget))

    @property
    def _cost(self) -> float:
        return self.n_tokens + SHARED_COST * self.n_prompts * (self.n_samples - 1) * self.prompt_tokens

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of the largest micro-batch. A longer row is computed alone, which is not counted."""
        largest = min(self.budget, self._cost / self.n_passes + 2 * self.row_tokens, self._cost)
        return int(largest * self.n_tokens / max(1.0, self._cost))

    @property
    def later_tokens(self) -> int:
        """Tokens of the largest micro-batch after the first one. It may compute the prompt of its first row again."""
        n_left = self.n_tokens - self.micro_batch_tokens
        return min(self.micro_batch_tokens, n_left + self.prompt_tokens) if n_left > 0 else 0

    @property
    def trained_share(self) -> float:
        """Share of the tokens that the loss counts."""
        return self.answer_tokens / max(1, self.n_tokens)


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """The memory of a run on some hardware."""

    hardware: Hardware
    parts: Sequence[MemoryPart]
    rows: Rows
    is_certain: bool
    """False if several processes run it, perhaps on other machines."""

    @property
    def phases(self) -> list[Phase]:
        """The phases of this kind of run, in order."""
        return [phase for phase in PHASES if any(part.phases.get(phase) for part in self.parts)]

    def total(self, place: Place, phase: Phase) -> float:
        """Return the bytes of a phase."""
        return sum(part.phases.get(phase, 0.0) for part in self.parts if part.place == place)

    def certain_total(self, place: Place, phase: Phase) -> float:
        """Return the bytes of a phase without what host memory may lack.

        A cache takes only what the sequences fill, and the system drops the pages of a file that it can read again.
        """
        spare = (part for part in self.parts if part.name in (CACHE, FILES) and part.place == place == "host")
        return self.total(place, phase) - sum(part.phases.get(phase, 0.0) for part in spare)

    def peak(self, place: Place) -> tuple[Phase, float]:
        """Return the phase that takes most memory, and its bytes."""
        phase = max(self.phases, key=lambda phase: self.total(place, phase))
        return phase, self.total(place, phase)

    def capacity(self, place: Place) -> float:
        """Return the bytes that are free before the run starts."""
        device = self.hardware.device_bytes
        return self.hardware.host_bytes if place == "host" or device is None else device

    @property
    def places(self) -> list[Place]:
        return ["device", "host"] if self.hardware.has_gpus else ["host"]

    def find_shortage(self) -> tuple[Place, Phase] | None:
        """Return the place and the phase that lack most memory, or None if the run fits."""
        place = max(self.places, key=lambda place: self.peak(place)[1] - self.capacity(place))
        phase, n_bytes = self.peak(place)
        return (place, phase) if n_bytes > self.capacity(place) else None


@dataclass(frozen=True)
class _Forecaster:
    """The parts of a run's memory."""

    plan: TrainingPlan
    hardware: Hardware
    config: PretrainedConfig
    """The policy's configuration. A critic or reference is assumed to have the same layers."""
    rows: Rows

    def list_parts(self) -> Iterator[MemoryPart]:
        """Yield the parts. Parts of several phases come first."""
        yield from self._processes()
        for model in self.plan.models:
            yield from self._weights(model)
        yield from self._files()
        yield from self._engine()
        yield from self._passes()
        yield from self._copies()

    @property
    def _kind(self) -> str:
        return "cuda" if self.hardware.has_gpus else "cpu"

    @property
    def _device(self) -> Place:
        return "device" if self.hardware.has_gpus else "host"

    def _phases(self, *, first: Phase = "load") -> list[Phase]:
        """Return the phases of this kind of run from `first` on."""
        has_rollouts = isinstance(self.plan, RunPlan)
        has_scores = has_rollouts or len(self.plan.models) > 1
        missing = {"rollout": not has_rollouts, "sync": not has_rollouts, "score": not has_scores}
        return [phase for phase in PHASES[PHASES.index(first) :] if not missing.get(phase)]

    def _part(self, name: str, n_bytes: float, phases: Sequence[Phase], place: Place | None = None) -> MemoryPart:
        return MemoryPart(name, place or self._device, dict.fromkeys(phases, n_bytes))

    def _share(self, model: PlannedModel) -> float:
        """Return the share of a model that each GPU holds. Without GPUs, the share that all ranks of a node hold."""
        ranks = self.plan.ranks
        if not ranks:
            return 1.0
        n_per_node = 1 if self.hardware.has_gpus else ranks[model.role][1]
        return n_per_node / self.plan.count_shards(model, ranks)

    def _processes(self) -> Iterator[MemoryPart]:
        n_engines = 0
        if isinstance(self.plan, RunPlan) and (self.plan.ranks or self.plan.cfg.has_engine_process):
            n_engines = self.plan.cfg.generator.n_local_engines
        n_ranks = sum(n_per_node for _, n_per_node in self.plan.ranks.values())
        n_bytes = PROCESS_BYTES[self._kind] * (1 + n_ranks) + ENGINE_PROCESS_BYTES * n_engines
        yield self._part("process and libraries", n_bytes, self._phases(), "host")
        if not self.hardware.has_gpus and self._value_bytes == 2:
            yield self._part("bfloat16 kernels", KERNEL_BYTES * max(1, n_ranks), self._phases(first="rollout"))
        if self.hardware.has_gpus:
            n_contexts = len(self.plan.ranks) or 1
            yield self._part("CUDA context", CONTEXT_BYTES * n_contexts, self._phases())

    def _weights(self, model: PlannedModel) -> Iterator[MemoryPart]:
        """Yield a model's weights, gradients and optimizer state.

        Models are updated one after another, so only the largest gradients count. With offloading, everything but the
        policy's weights is on the device only while its model computes. Models then take turns, so a smaller model than
        the largest one of a phase adds nothing.
        """
        share, training, always = self._share(model), model.training, self._phases()
        place = "host" if self._is_on_host(model) else self._device
        weights = share * (model.frozen_bytes + training.weights)
        after_step = self._phases(first=always[1])
        if self.plan.offloads_idle and self.hardware.has_gpus:
            own: list[Phase] = ["score"] if model.role in ("ref", "reward") else ["score", "update"]
            others = [other for other in self.plan.models if other.role != model.role]
            is_largest = all(model.training_bytes >= other.training_bytes for other in others)
            updated: Sequence[Phase] = ["update"] if is_largest else []
            loaded, stepped = always if model.role == "policy" else own if is_largest else [], updated
            n_per_node = self.plan.ranks[model.role][1] if self.plan.ranks else 1
            idle = training.moments + (weights / share if others else 0)
            yield self._part(f"{model.name}: offloaded", n_per_node * share * idle, after_step, "host")
        else:
            neighbors = [other for other in self.plan.models if self._is_on_host(other) == self._is_on_host(model)]
            largest = max(neighbors, key=lambda other: self._share(other) * other.training.gradients)
            updated = ["update"] if model is largest else []
            loaded, stepped = always, after_step
        yield self._part(f"{model.name}: weights", weights, loaded, place)
        yield self._part(f"{model.name}: gradients", share * training.gradients, updated, place)
        yield self._part(f"{model.name}: optimizer state", share * training.moments, stepped, place)
        yield self._part(f"{model.name}: master weights", share * training.host_weights, always, "host")
        yield self._part(f"{model.name}: gradients", share * training.host_gradients, ["update"], "host")
        yield self._part(f"{model.name}: optimizer state", share * training.host_moments, after_step, "host")

    def _files(self) -> Iterator[MemoryPart]:
        """Yield the files of one model, which are mapped into memory while they are read.

        Weights of the files' dtype share their memory until they are moved or converted. Several ranks, and models that
        are quantized, read tensor by tensor, of which the embeddings are the largest.
        """
        sizes = [0.0]
        for model in self.plan.models:
            if self.plan.ranks or (model.lora is not None and model.lora.is_quantized):
                text = self.config.get_text_config()
                n_embeddings = text.vocab_size * text.hidden_size
                sizes.append(n_embeddings * model.file_bytes / (model.n_parameters or 1))
                continue
            is_converted = model.lora is None and model.training.weights and model.train_dtype != model.dtype
            if self.hardware.has_gpus:
                sizes.append(model.file_bytes + (0 if model.is_mapped else model.weight_bytes))
            elif not model.is_mapped or is_converted:
                sizes.append(model.file_bytes)
        yield self._part(FILES, max(sizes), ["load"], "host")

    def _is_on_host(self, model: PlannedModel) -> bool:
        """Return True if FSDP2 keeps a model in host memory."""
        section = getattr(self.plan.cfg.trainer, model.role, self.plan.cfg.trainer.policy)
        is_sharded = bool(self.plan.ranks) and not self.plan.cfg.trainer.strategy_traits.is_model_parallel
        return is_sharded and bool(section.fsdp_config.cpu_offload)

    def _engine(self) -> Iterator[MemoryPart]:
        """Yield the engine's weights and its key-value cache, which on a CPU holds every sequence that runs at once."""
        if not isinstance(self.plan, RunPlan) or not self.plan.cfg.generator.n_local_engines:
            return
        cfg, generator, phases = self.plan.cfg, self.plan.cfg.generator, self._phases(first="rollout")
        if self.plan.offloads_idle and self.hardware.has_gpus:
            phases = ["rollout", "sync"]
        n_copies = 1 if self.hardware.has_gpus else generator.n_local_engines
        yield self._part("engine: weights", self.plan.engine_bytes * n_copies, phases)
        dtype = cfg.engine_dtype(has_gpu=self.hardware.has_gpus)
        per_token = config_cache_bytes_per_token(self.config, getattr(torch, dtype))
        n_sequences = min(generator.max_num_seqs, cfg.trainer.train_batch_size * generator.n_samples_per_prompt)
        others = [*self._processes(), *(part for model in self.plan.models for part in self._weights(model))]
        used = sum(part.phases.get("rollout", 0) for part in others if part.place == self._device)
        used += self.plan.engine_bytes * n_copies
        if not self.plan.offloads_idle:
            used += sum(self._share(model) * model.training.gradients for model in self.plan.models)
        free = (self.hardware.device_bytes or self.hardware.host_bytes) - used
        cache = generator.gpu_memory_utilization * max(0.0, free)
        if not self.hardware.has_gpus:
            # The system provides huge pages as they are written. A layer's keys and values each end inside of one.
            n_tokens = n_sequences * -(-self.rows.row_tokens // CACHE_UNIT) * CACHE_UNIT
            cache = min(cache, n_tokens * per_token + self.config.get_text_config().num_hidden_layers * HUGE_PAGE_BYTES)
        yield self._part(CACHE, cache, ["rollout"] if self.plan.frees_cache else phases)
        n_prompts = max(1, n_sequences // generator.n_samples_per_prompt)  # samples of a prompt read it once
        n_new = min(generator.max_num_batched_tokens, n_prompts * self.rows.prompt_tokens)
        n_bytes = n_new * pass_bytes_per_token(self.config, value_bytes=self._value_bytes)
        logits = n_sequences * self.config.get_text_config().vocab_size * 4
        if self.plan.needs_engine_model:
            yield self._temporary("engine: forward pass", n_bytes + logits, ["rollout"])

    @property
    def _value_bytes(self) -> int:
        """Bytes of an activation."""
        trainer = self.plan.cfg.trainer
        return 2 if (self.hardware.has_gpus and trainer.bf16) or self.plan.models[0].train_dtype == "bfloat16" else 4

    def _temporary(self, name: str, n_bytes: float, phases: Sequence[Phase]) -> MemoryPart:
        """Return memory that is allocated and freed again and again, with what the allocator cannot reuse."""
        n_ranks = 1 if self.hardware.has_gpus or not self.plan.ranks else self.plan.ranks[self.plan.models[0].role][1]
        return self._part(name, n_ranks * n_bytes * (1 + FRAGMENTATION[self._kind]), phases)

    def _passes(self) -> Iterator[MemoryPart]:
        """Yield the memory of the passes over a micro-batch: activations, the head's values, casts and gradients."""
        trainer, rows, size = self.plan.cfg.trainer, self.rows, self._value_bytes
        policy = self.plan.models[0]
        text = self.config.get_text_config()
        n_tokens, embeddings = rows.micro_batch_tokens, text.vocab_size * text.hidden_size * 4
        inside = n_tokens * pass_bytes_per_token(self.config, value_bytes=size)
        head = HEAD_BLOCK_BYTES[self._kind] + n_tokens * rows.trained_share * text.hidden_size * 4
        yield self._temporary("forward pass", inside + head, ["score"] if "score" in self._phases() else [])
        kept = activation_bytes_per_token(self.config, checkpointing=trainer.gradient_checkpointing, value_bytes=size)
        if trainer.activation_offload:
            yield self._part("activations", n_tokens * kept, ["update"], "host")
            kept = activation_bytes_per_token(self.config, value_bytes=size) // text.num_hidden_layers
        # The first backward pass replaces activations by gradients, layer by layer. Only later passes start with both.
        first, later = (n * kept + inside for n in (n_tokens, rows.later_tokens))
        on_host = 0.0 if self.hardware.has_gpus else policy.training.host_gradients
        gradients = self._share(policy) * (policy.training.gradients + on_host)
        yield self._temporary("activations", max(first - gradients, later), ["update"])
        if not self.hardware.has_gpus:
            head += min(MAX_SAVED_BYTES, n_tokens * rows.trained_share * text.vocab_size * 4)
        yield self._temporary("logits", head, ["update"])
        if policy.n_dequantized:  # with its codes as integers; on a CPU, also the gaps that quantizing leaves
            gaps = 0 if self.hardware.has_gpus else MAX_FREED_BYTES
            n_bytes = gaps + policy.n_dequantized * (8 if size == 2 else 6)
            yield self._part("dequantized matrix", n_bytes, self._phases(first="rollout"))
        if policy.lora is None:
            # The embeddings' gradient is computed apart and then added to what the head or earlier passes left.
            n_copies = int(bool(text.tie_word_embeddings)) + int(rows.n_passes > 1)
            yield self._temporary("gradients in progress", n_copies * embeddings, ["update"])
        if self.hardware.has_gpus and trainer.bf16 and policy.train_dtype == "float32":
            casts = self._share(policy) * 2 * (policy.n_parameters or 0) if not self.plan.ranks else 0
            yield self._temporary("bfloat16 copies of weights", casts, ["score", "update"])

    def _copies(self) -> Iterator[MemoryPart]:
        """Yield the copy in host memory from which a checkpoint is written."""
        n_bytes = sum(self._share(model) * model.checkpoint_bytes for model in self.plan.models if model.role != "ref")
        if self.plan.cfg.trainer.ckpt_interval > 0:
            n_per_node = self.plan.ranks[self.plan.models[0].role][1] if self.plan.ranks else 1
            yield self._part(
                "copy of the checkpoint", n_bytes * (n_per_node if self.hardware.has_gpus else 1), ["save"], "host"
            )


def forecast_memory(plan: TrainingPlan, hardware: Hardware) -> MemoryForecast | None:
    """Forecast the memory of a run, or return None before its models are downloaded."""
    if not plan.has_known_sizes or (config := plan.models[0].read_config()) is None:
        return None
    trainer = plan.cfg.trainer
    n_ranks = plan.count_data_parallel_ranks()
    n_context = int(getattr(config, "max_position_embeddings", None) or 2**31)
    if isinstance(plan, RunPlan):
        generator, n_prompts = plan.cfg.generator, plan.cfg.trainer.policy_mini_batch_size
        prompt = plan.longest_prompt or plan.cfg.trainer.max_prompt_length
        n_turn_tokens = generator.sampling_params.max_generate_length
        n_reply_tokens = 0 if generator.max_turns == 1 else TURN_TOKENS
        length = prompt + generator.max_turns * (n_turn_tokens + n_reply_tokens) - n_reply_tokens
        if generator.max_input_length is not None:
            length = min(length, generator.max_input_length + n_turn_tokens)
        n_samples = generator.n_samples_per_prompt
    else:
        assert isinstance(plan.cfg, SupervisedConfig)
        n_prompts, prompt = plan.cfg.trainer.train_batch_size, 0
        n_samples = 2 if isinstance(plan.cfg.trainer, DPOTrainerConfig) else 1
        length = plan.cfg.data.row_length(n_context)
    device = torch.device("cuda" if hardware.has_gpus else "cpu")
    budget = trainer.max_tokens_per_microbatch or default_max_tokens(config, device)
    rows = Rows(-(-n_prompts // n_ranks), n_samples, prompt, min(length, n_context), budget)
    is_certain = not plan.ranks and os.environ.get("WORLD_SIZE", "1") == "1"
    parts = _Forecaster(plan, hardware, config, rows).list_parts()
    return MemoryForecast(hardware, [part for part in parts if any(part.phases.values())], rows, is_certain)
