"""One rank of one model: policy, critic, reference or reward model."""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.checkpoint import disk_error, to_bytes
from skyrl_train.distributed import BASE_MODEL, METADATA, DistributedStrategy, Pass, TrainState
from skyrl_train.distributed.strategy import SCHEDULE
from skyrl_train.errors import CheckpointError, WorkerError
from skyrl_train.models.generation import save_generation_config
from skyrl_train.models.lora import (
    ADAPTER_FOLDER,
    BASE_CHECKSUM,
    base_checksum,
    change_norm,
    count_parameters,
    save_adapter,
)
from skyrl_train.models.memory import default_max_tokens
from skyrl_train.models.offload import OffloadedTensors, count_kept_bytes, release_cached_memory, release_heap
from skyrl_train.optimizers import HostWeights, create_optimizer, hidden_matrices
from skyrl_train.out_of_memory import describe_memory, free_references, is_out_of_memory
from skyrl_train.plan.hardware import free_host_bytes
from skyrl_train.types import Metric, Metrics, Shard, TrainingBatch
from skyrl_train.types.specs import LoraSpec, ModelPart, ModelSpec, OptimizerSpec, SyncKind, TensorSpec, absolute
from skyrl_train.types.training_memory import TrainingBytes, training_bytes
from skyrl_train.weight_sync import Receipt, Receiver, SyncPlan, send
from skyrl_train.weight_sync.transfer import SentWeights
from skyrl_train.workers.random_state import random_state, set_random_state

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")

MIN_KEPT_BYTES = 1 << 28
"""Memory freed by an update that is too little to be worth giving back."""
REQUIRED_PARTS: dict[str, ModelPart] = {}
"""Part of the model that each method of `Worker` needs on the device. Methods without an entry need none."""


def requires(part: ModelPart) -> Callable[[Callable[Concatenate[Worker, P], T]], Callable[Concatenate[Worker, P], T]]:
    """Declare the part of the model that a method of `Worker` needs on the device.

    `WorkerGroup` moves it there before a call. The method raises WorkerError if it is still in host memory.
    """

    def check(method: Callable[Concatenate[Worker, P], T]) -> Callable[Concatenate[Worker, P], T]:
        REQUIRED_PARTS[method.__name__] = part

        @wraps(method)
        def checked(worker: Worker, *args: P.args, **kwargs: P.kwargs) -> T:
            for name in _parts(part):
                if name in worker._offloaded:
                    raise WorkerError(
                        f"{method.__name__} cannot run while the {worker._spec.role} has its {name} in host memory; "
                        "call move('device') first"
                    )
            return method(worker, *args, **kwargs)

        return checked

    return check


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a loaded model. Identical on all ranks."""

    n_embeddings: int  # rows of the input embedding
    n_trained: int  # trained parameters
    n_parameters: int
    checkpoint_bytes: int  # estimate: trained weights with their moments, and frozen weights
    update_bytes: int  # gradients and moments on the device, which the first update allocates
    shares_prefixes: bool
    """True if prefixes shared within a micro-batch are computed once."""
    max_tokens_per_micro_batch: int


class Worker:
    """One rank of a model. It scores tokens, and trains if its spec has an optimizer.

    Every method is synchronous. All ranks of a model get the same calls in the same order.
    """

    def __init__(self, spec: ModelSpec, strategy: DistributedStrategy[Any], objective: Objective | None = None) -> None:
        """Load the model, and create its optimizer if `spec.optimizer` is set. `objective` is None for scoring only."""
        self._spec = spec
        self._strategy = strategy
        self._objective = objective
        self.module = strategy.build(spec, entropy_grad=objective is not None and objective.needs_entropy_grad)
        self._state = TrainState(self.module)
        if spec.optimizer is None:
            self.module.requires_grad_(False)
        else:
            trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            if spec.optimizer.config.cpu_offload:
                self._state.host_weights = HostWeights(trained)
                trained = list(self._state.host_weights.masters.values())
            self._state.optimizer = create_optimizer(trained, spec.optimizer, self.module.hf_model)
            self._state.scheduler = make_scheduler(self._state.optimizer, spec.optimizer)
        if spec.lora is not None and spec.lora.config.dropout > 0:  # ranks with other rows draw other dropout masks
            torch.manual_seed((spec.lora.seed + strategy.random_stream) % 2**63)
        # Writes compute with one core and leave the rest to the compute thread.
        self._writer = ThreadPoolExecutor(1, "checkpoint", initializer=torch.set_num_threads, initargs=(1,))
        self._saving: Future[None] | None = None
        self._sent: SentWeights | None = None  # set by the first sync that sends changes
        self._skipping_updates = False  # True while gradients are NaN or infinite
        self._offloaded: dict[ModelPart, OffloadedTensors] = {}  # parts in host memory

    def move(self, to: Literal["cpu", "device"], part: ModelPart = "all") -> int:
        """Move a part of the model to host memory or back, bit for bit. Return the bytes moved, 0 if already there.

        If host memory is too small, raise WorkerError. The part then stays on its device.
        """
        device, n_bytes = torch.device(self._strategy.world.device), 0
        for name in _parts(part):
            if to == "cpu" and name not in self._offloaded:
                try:
                    self._offloaded[name] = OffloadedTensors(self._tensors(name), device)
                except RuntimeError as error:
                    raise WorkerError(
                        f"host memory has no room for the {name} of the {self._spec.role}: {error}. Use a larger "
                        "machine, or set trainer.placement.offload_idle=false to keep all models on their devices."
                    ) from error
                n_bytes += self._offloaded[name].n_bytes
            elif to == "device" and name in self._offloaded:
                self._offloaded[name].restore()
                n_bytes += self._offloaded.pop(name).n_bytes
        if to == "cpu":
            release_cached_memory(device)
        return n_bytes

    def _tensors(self, part: ModelPart) -> Iterator[torch.Tensor]:
        """Yield the tensors of a part of the model."""
        if part == "weights":
            yield from self.module.parameters()
            yield from self.module.buffers()
            return
        if self._state.optimizer is not None:
            yield from (p.grad for p in self._state.optimizer.parameters if p.grad is not None)
            for values in self._state.optimizer.state.values():
                yield from (value for value in values.values() if isinstance(value, torch.Tensor))

    def facts(self) -> ModelFacts:
        """Return the sizes of the loaded model. They do not change during a run."""
        model = self.module.hf_model
        n_trained, n_parameters = count_parameters(model)
        saves_all = self._spec.lora is None  # the base of an adapter is not saved
        checkpoint_bytes = sum(p.nbytes for p in model.parameters() if saves_all and not p.requires_grad)
        update_bytes = 0
        for part in self._training_bytes():
            checkpoint_bytes += round(part.in_checkpoint)
            on_host = part.host_gradients + part.host_moments if self._strategy.world.device == "cpu" else 0
            update_bytes += round(part.gradients + part.moments + on_host)
        return ModelFacts(
            n_embeddings=len(model.get_input_embeddings().weight),
            n_trained=n_trained,
            n_parameters=n_parameters,
            checkpoint_bytes=checkpoint_bytes,
            update_bytes=update_bytes,
            shares_prefixes=self.module.shares_prefixes,
            max_tokens_per_micro_batch=self._spec.max_tokens_per_micro_batch
            or default_max_tokens(model.config, torch.device(self._strategy.world.device)),
        )

    def _training_bytes(self) -> Iterator[TrainingBytes]:
        """Yield the bytes of each whole trained parameter."""
        model, optimizer = self.module.hf_model, self._spec.optimizer
        if optimizer is None:
            return
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = set(hidden_matrices(trained, model))
        for parameter in trained:
            yield training_bytes(
                "bfloat16" if parameter.dtype == torch.bfloat16 else "float32",
                optimizer.config.name,
                cpu_offload=optimizer.config.cpu_offload,
                shape=parameter.shape,
                is_hidden_matrix=parameter in matrices,
            )

    @requires("weights")
    def score(self, shard: Shard, adapter: bool = True) -> dict[str, torch.Tensor]:
        """Score the shard's rows: (b, R) float32 on the CPU, 0 where the loss mask is 0.

        `adapter=False` disables the adapter. With tensor or sequence parallelism, several ranks get the same rows, but
        only their leader returns scores. All other ranks return {}.
        """
        settings = Pass(self._spec.bf16, adapter=adapter)
        scored: list[Any] = self._strategy.run(self.module, shard, lambda scores, _: (None, scores), settings)
        layout, rank = self._spec.layout(self._strategy.world.size), self._strategy.world.rank
        if rank != layout.leader(layout.data_parallel_rank(rank)):
            return {}
        columns = {name: torch.zeros_like(shard.rows.loss_mask) for name in self.module.scores_type._fields}
        for scores, indices in zip(scored, shard.micro_batches, strict=True):
            for name, values in scores._asdict().items():
                columns[name][indices] = values.cpu()
        return columns

    @requires("all")
    def forward_backward(self, shard: Shard) -> Metrics:
        """Add the gradient of the shard's part of the loss to the parameters."""
        assert self._objective is not None, f"the {self._spec.role} has no objective"
        offload = self._spec.activation_offload
        settings = Pass(self._spec.bf16, backward=True, dropout=True, activation_offload=offload)
        measuring = self.module.measuring_experts() if self._spec.role == "policy" else nullcontext(Metrics())
        with self._undoing_on_shortage(), measuring as loads:
            metrics = Metrics().merge(*self._strategy.run(self.module, shard, self._objective, settings))
        return metrics.merge(loads)

    @contextmanager
    def _undoing_on_shortage(self) -> Iterator[None]:
        """If memory runs out in a backward pass, drop all gradients and draw the same dropout masks again."""
        device = torch.device(self._strategy.world.device)
        state = torch.get_rng_state()
        device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                assert self._state.optimizer is not None
                self._state.optimizer.zero_grad(set_to_none=True)  # of copies in host memory, too
                self.module.zero_grad(set_to_none=True)
                torch.set_rng_state(state)
                if device_state is not None:
                    torch.cuda.set_rng_state(device_state, device)
            raise

    @requires("all")
    def optim_step(self) -> Metrics:
        """Clip the accumulated gradients and apply them, or drop them all if their norm is NaN or infinite."""
        state, role = self._state, self._spec.role
        assert state.optimizer is not None
        assert state.scheduler is not None
        assert self._spec.optimizer is not None
        norm = self._strategy.clip_gradients(state, self._spec.optimizer.config.max_grad_norm)
        is_finite = math.isfinite(norm)
        metrics = Metrics(
            {
                f"{role}_lr": Metric("mean", float(state.optimizer.param_groups[0]["lr"])),
                "skipped_updates": Metric("sum", float(not is_finite)),
            }
        )
        if is_finite:
            if any(parameter.grad is not None for parameter in state.optimizer.parameters):  # some token was trained
                metrics["grad_norm"] = Metric("mean", norm)
            state.optimizer.step()
            if state.host_weights is not None:
                state.host_weights.publish()
            state.scheduler.step()
        elif not self._skipping_updates:
            logger.warning("The gradient norm of the %s is %s: updates are skipped until it is finite", role, norm)
        self._skipping_updates = not is_finite
        if self._spec.lora is not None:
            norm = change_norm(self.module.hf_model, self._strategy.gather_from(self.module))
            metrics["adapter_norm"] = Metric("mean", norm)
        state.optimizer.zero_grad(set_to_none=True)
        if self._strategy.world.device == "cpu" and count_kept_bytes() > max(MIN_KEPT_BYTES, free_host_bytes() / 2):
            release_heap()  # otherwise the next update is faster with it
        return metrics

    @requires("weights")
    def is_finite(self) -> bool:
        """Return False if a weight is NaN or infinite."""
        return self._strategy.is_finite(self.module)

    @requires("all")
    def probe(self, shard: Shard) -> Metrics:
        """Return the mean log-prob or value of the shard's tokens, and its gradient norm. No parameter changes."""
        assert self._state.optimizer is not None

        def consume(scores: Any, rows: TrainingBatch) -> tuple[torch.Tensor, Metrics]:
            total = scores[0].sum()
            return total, Metrics({"mean": Metric("mean", total.item(), rows.loss_mask.sum().item())})

        settings = Pass(self._spec.bf16, backward=True)
        with self._undoing_on_shortage():
            metrics = Metrics().merge(*self._strategy.run(self.module, shard, consume, settings))
        metrics["grad_norm"] = Metric("mean", self._strategy.clip_gradients(self._state, math.inf))
        self._state.optimizer.zero_grad(set_to_none=True)
        return metrics

    @requires("all")
    def begin_save(self, folder: Path) -> OSError | None:
        """Copy weights, optimizer, schedule and this rank's random state to host memory, and write in the background.

        This thread touches no disk. The file `METADATA` appears in the folder once every rank has written its part.
        If the host memory of any rank has no room for the copy, return an OSError on every rank and write nothing.
        Training may continue.
        """
        self.finish_save()
        release_heap()  # the copy does not fit the gaps that the last update left
        state, lora, rank, model = self._state, self._spec.lora, self._strategy.world.rank, self.module.hf_model
        files = {f"rng_{rank}.pt": to_bytes(random_state(self._strategy.world.device))}
        if rank == 0 and state.scheduler is not None:
            files[SCHEDULE] = to_bytes(state.scheduler.state_dict())
        if rank == 0 and lora is None and model.name_or_path:
            files[BASE_MODEL] = f"{absolute(model.name_or_path)}\n".encode()
        adapter = None
        if lora is not None:
            adapter, checksum = self._strategy.copy_adapter(self.module), self._base_checksum  # on every rank
            files |= {BASE_CHECKSUM: f"{checksum}\n".encode()} if rank == 0 else {}

        def write_files() -> None:
            for name, content in files.items():
                (folder / name).write_bytes(content)
            if rank == 0:
                description = folder / "huggingface"  # a Hugging Face folder without weights
                model.config.save_pretrained(description)
                save_generation_config(model, description, self._spec.eos_ids)
                self._spec.save_tokenizer(str(description))
                if lora is not None and adapter is not None:
                    save_adapter(model, adapter, lora.base_path, folder / ADAPTER_FOLDER)

        copied = self._copy_state()
        if isinstance(copied, OSError):
            return copied
        self._saving = self._writer.submit(self._strategy.write, copied, folder, write_files)
        return None

    def _copy_state(self) -> dict[str, Any] | OSError:
        """Copy the state to host memory. Return an OSError on every rank if the memory of one has no room for it.

        Ranks agree before they write, because a rank that writes waits for the other ranks.
        """
        copied, shortage = None, ""
        try:
            copied = self._strategy.copy(self._state)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            shortage = f": {describe_memory()}"
            free_references(error)
        if self._strategy.all_true(copied is not None):
            assert copied is not None
            return copied
        return OSError(errno.ENOMEM, f"host memory has no room for a copy of the {self._spec.role}{shortage}")

    def is_written(self) -> bool:
        """Return True if `finish_save` would not wait."""
        return self._saving is None or self._saving.done()

    def finish_save(self) -> OSError | None:
        """Wait for the last save, if any. Return an OSError if it failed, so that training may continue."""
        if self._saving is None:
            return None
        saving, self._saving = self._saving, None
        try:
            saving.result()
        except CheckpointException as error:  # a BaseException, so `except Exception` would miss it
            return OSError(f"the {self._spec.role} could not be written: {_root_cause(error)}")
        return None

    @requires("all")
    def load_state(self, folder: Path) -> None:
        """Load a checkpoint, saved by any number of ranks. The learning rate follows this worker's schedule.

        Raise CheckpointError if a file is missing or belongs to another model.
        """
        try:
            if not (folder / METADATA).exists():
                raise FileNotFoundError(f"{folder / METADATA} is missing")
            if self._spec.lora is not None:
                self._check_base(folder, self._spec.lora)
            self._strategy.load(self._state, folder)
            if self._state.host_weights is not None:
                self._state.host_weights.publish()
            self._follow_schedule()
            rng = folder / f"rng_{self._strategy.random_stream}.pt"
            if rng.exists():  # the run that saved may have had fewer ranks
                set_random_state(torch.load(rng, weights_only=True), self._strategy.world.device)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"cannot resume the {self._spec.role} from {folder}: {_root_cause(error)}; it must hold a complete "
                "checkpoint of the same model, written by this version"
            ) from error

    def _follow_schedule(self) -> None:
        """Set the learning rate to this schedule's value at the loaded step. Warn if the checkpoint had another value.

        The checkpoint's value is read from its schedule, because before the first update it has no optimizer state.
        """
        optimizer, scheduler = self._state.optimizer, self._state.scheduler
        if optimizer is None or scheduler is None:
            return
        (group,) = optimizer.param_groups
        ((base, scale),) = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        saved, group["lr"] = float(scheduler.get_last_lr()[0]), base * scale(scheduler.last_epoch)
        if group["lr"] != saved and self._strategy.world.rank == 0:
            logger.warning(
                "The learning rate of the %s is %g, but the checkpoint's was %g, because the schedule has changed",
                *(self._spec.role, group["lr"], saved),
            )

    @requires("weights")
    def export(self, folder: Path) -> OSError | None:
        """Write a Hugging Face folder: the model, the adapter in peft's format, or with `merge_on_export` both.

        If the write fails, return its OSError. Training may continue, as all collectives run before the first write.
        """
        lora = self._spec.lora
        writes_model = lora is None or lora.config.merge_on_export
        adapter = None if lora is None else self._strategy.copy_adapter(self.module)
        try:
            if writes_model:
                self._strategy.export(self.module, folder)
            if self._strategy.world.rank == 0:
                if writes_model:
                    save_generation_config(self.module.hf_model, folder, self._spec.eos_ids)
                if lora is not None and adapter is not None:
                    adapter_folder = folder / ADAPTER_FOLDER if writes_model else folder
                    save_adapter(self.module.hf_model, adapter, lora.base_path, adapter_folder)
                self._spec.save_tokenizer(str(folder))
        except (OSError, SafetensorError) as error:
            return OSError(f"the {self._spec.role} could not be written: {error}")
        return None

    def tensor_specs(self, kind: SyncKind) -> list[TensorSpec]:
        """Return the tensors that `send_weights` sends, in order."""
        return self._strategy.tensor_specs(self.module, kind)

    @requires("weights")
    def send_weights(self, plan: SyncPlan) -> Receipt:
        """Send the weights to the receivers of `plan`. Every rank must call this, because gathering is collective."""
        if plan.tracks_changes and self._sent is None:
            self._sent = SentWeights()
        sent_weights = self._sent if plan.tracks_changes else None
        is_shared = plan.transport == "shared"  # the engine uses the model's own tensors, so they must not be rounded
        return send(plan, self._strategy.full_tensors(self.module, plan.kind, as_exported=not is_shared), sent_weights)

    @requires("weights")
    def receive_weights(self, plan: SyncPlan) -> Receipt:
        """Load weights of a model of the same architecture, as receiver number `plan.rank` + this rank."""
        receiver = Receiver(replace(plan, rank=plan.rank + self._strategy.world.rank))
        self._strategy.load_tensors(self.module, receiver)
        return receiver.receipt

    @cached_property
    def _base_checksum(self) -> str:
        """Checksum of the frozen weights. Computing it is collective."""
        return base_checksum(self.module.hf_model, self._strategy.gather_from(self.module))

    def _check_base(self, folder: Path, lora: LoraSpec) -> None:
        """Raise ValueError if a checkpoint has no adapter, or if its adapter has another base model."""
        path = folder / BASE_CHECKSUM
        if not path.exists():
            if not (folder / ADAPTER_FOLDER).is_dir():
                raise ValueError(f"it holds a full model, but {lora.key} trains an adapter")
            logger.warning(
                "%s is missing, as in checkpoints of old versions. The adapter is resumed without checking that it was "
                "trained on %s.",
                path,
                lora.base_path,
            )
            return
        expected, found = path.read_text(encoding="utf-8").split(), self._base_checksum.split()
        if expected[0] != found[0]:
            raise ValueError(f"its adapter was trained on weights that differ from {lora.base_path}")
        if expected != found:
            raise ValueError(
                f"its adapter was trained with {lora.key}.quantize_base={(*expected, 'none')[1]}, not "
                f"{(*found, 'none')[1]}; set it to the same value"
            )

    def close(self) -> None:
        """Wait for a save in progress."""
        self._writer.shutdown()


def _parts(part: ModelPart) -> tuple[ModelPart, ...]:
    return ("weights", "optimizer") if part == "all" else (part,)


def make_scheduler(optimizer: torch.optim.Optimizer, spec: OptimizerSpec) -> LambdaLR:
    """Return the learning-rate schedule."""
    is_wsd = spec.config.scheduler == "wsd"
    return get_scheduler(
        "warmup_stable_decay" if is_wsd else spec.config.scheduler,
        optimizer,
        num_warmup_steps=spec.n_warmup_steps,
        num_training_steps=max(spec.n_steps, spec.n_warmup_steps + 1),  # polynomial decay divides by their difference
        scheduler_specific_kwargs={"num_decay_steps": spec.n_decay_steps} if is_wsd else None,
    )


def _root_cause(error: BaseException) -> str:
    """Return the first of the errors that DCP collects from its ranks."""
    if isinstance(error, CheckpointException):
        error = next((reason for reason, _ in error.failures.values()), error)
    error = disk_error(error)
    return f"{type(error).__name__}: {error}"
