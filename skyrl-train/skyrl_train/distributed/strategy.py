"""The interface of a distributed strategy, and what all of them do the same way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from skyrl_train.models.loading import autocast, checkpointed_layers
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.types import Scores, TrainingBatch
from skyrl_train.types.specs import ModelSpec, TensorSpec, World

T = TypeVar("T")

# A single process saves alone on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@dataclass(slots=True)
class TrainState:
    """Everything of a model that changes in a run, except random generators."""

    module: ScoringModule
    optimizer: torch.optim.Optimizer | None = None
    scheduler: LRScheduler | None = None


class DistributedStrategy(Protocol):
    """Spreads one model over the ranks of a world. All ranks make the same calls in the same order."""

    world: World

    def build(self, spec: ModelSpec, *, entropy_grad: bool) -> ScoringModule:
        """Load the model of `spec` and wrap it."""
        ...

    def run(
        self,
        module: ScoringModule,
        micro_batches: Sequence[TrainingBatch],
        consume: Callable[[Scores, TrainingBatch], tuple[torch.Tensor | None, T]],
        *,
        bf16: bool,
        backward: bool,
    ) -> list[T]:
        """Score every micro-batch and call `consume`, which returns the loss to differentiate if `backward` is set.

        Gradients are summed over micro-batches and ranks. Parameters are sharded again afterwards.
        """
        ...

    def clip_gradients(self, module: ScoringModule, max_norm: float) -> float:
        """Scale the gradients to a global norm of at most `max_norm`; return the norm before, which may be NaN."""
        ...

    def is_finite(self, module: ScoringModule) -> bool:
        """Return True on every rank if no parameter on any rank is NaN or infinite."""
        ...

    def tensor_specs(self, module: ScoringModule) -> list[TensorSpec]:
        """Return the tensors of the whole model, in the order of `full_tensors`."""
        ...

    def full_tensors(self, module: ScoringModule) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the model, gathered on every rank, under its Hugging Face name."""
        ...

    def load_tensors(self, module: ScoringModule, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole tensors, named as in `full_tensors`, into the model."""
        ...

    def save(self, state: TrainState, folder: Path) -> Future[Any]:
        """Copy the state to host memory, then write it into `folder` in the background."""
        ...

    def load(self, state: TrainState, folder: Path) -> None:
        """Load what any number of ranks saved into the tensors that are there."""
        ...

    def export(self, module: ScoringModule, folder: Path) -> None:
        """Write a plain Hugging Face folder."""
        ...


class LocalCompute:
    """The part of a strategy that does not depend on how parameters are spread."""

    world: World

    def run(
        self,
        module: ScoringModule,
        micro_batches: Sequence[TrainingBatch],
        consume: Callable[[Scores, TrainingBatch], tuple[torch.Tensor | None, T]],
        *,
        bf16: bool,
        backward: bool,
    ) -> list[T]:
        """See `DistributedStrategy.run`."""
        device = torch.device(self.world.device)
        results: list[T] = []
        for micro_batch in micro_batches:
            rows = micro_batch.to(device)
            if not backward:
                with torch.no_grad(), autocast(device, bf16):
                    results.append(consume(module.score(rows), rows)[1])
                continue
            with checkpointed_layers(hf_model(module)):
                with autocast(device, bf16):
                    scores = module.score(rows)
                loss, result = consume(scores, rows)
                assert loss is not None
                loss.backward()
            results.append(result)
        return results

    def _checkpoint_state(self, state: TrainState) -> dict[str, Any]:
        """Return what a checkpoint holds, by parameter name; the tensors are those of the model and its optimizer."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        saved: dict[str, Any] = {"model": get_model_state_dict(state.module)}
        if state.optimizer is not None and _is_trained(state.optimizer):
            saved["optimizer"] = get_optimizer_state_dict(state.module, state.optimizer, options=options)
        return saved

    def _save(self, state: TrainState, folder: Path, process_group: Any) -> Future[Any]:
        saved = self._checkpoint_state(state)
        if state.scheduler is not None and self.world.rank == 0:
            torch.save(state.scheduler.state_dict(), folder / "schedule.pt")
        is_alone = process_group is None
        future = dcp.async_save(saved, checkpoint_id=folder, process_group=process_group, no_dist=is_alone)
        assert isinstance(future, Future)
        return future

    def _load(self, state: TrainState, folder: Path, process_group: Any) -> None:
        # In place: an engine in the same process generates with these very tensors.
        saved: dict[str, Any] = {"model": get_model_state_dict(state.module)}
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        has_moments = any(name.startswith("optimizer.") for name in _saved_names(folder))
        if state.optimizer is not None and has_moments:
            saved["optimizer"] = get_optimizer_state_dict(state.module, state.optimizer, options=options)
        dcp.load(saved, checkpoint_id=folder, process_group=process_group, no_dist=process_group is None)
        set_model_state_dict(state.module, saved["model"])
        if state.optimizer is not None and has_moments:
            set_optimizer_state_dict(state.module, state.optimizer, saved["optimizer"], options=options)
        if state.scheduler is not None:
            state.scheduler.load_state_dict(torch.load(folder / "schedule.pt", weights_only=True))


def hf_model(module: ScoringModule) -> PreTrainedModel:
    """Return the Hugging Face model of a scoring module."""
    model = module.model
    assert isinstance(model, PreTrainedModel)
    return model


def _is_trained(optimizer: torch.optim.Optimizer) -> bool:
    """Return True after the first step; before it there are no moments, and asking for them would make some."""
    return bool(optimizer.state)


def _saved_names(folder: Path) -> set[str]:
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
