"""One rank: the model as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from skyrl_train.distributed.strategy import LocalCompute, TrainState, hf_model
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.types.specs import ModelSpec, TensorSpec, World


class SingleStrategy(LocalCompute):
    """Keeps the whole model on one device."""

    def __init__(self, world: World) -> None:
        assert world.size == 1, f"one rank cannot be one of {world.size}"
        self.world = world

    def build(self, spec: ModelSpec, *, entropy_grad: bool) -> ScoringModule:
        """See `DistributedStrategy.build`."""
        is_critic = spec.role == "critic"
        return ScoringModule(spec.load(), temperature=spec.temperature, entropy_grad=entropy_grad, is_critic=is_critic)

    def clip_gradients(self, module: ScoringModule, max_norm: float) -> float:
        """See `DistributedStrategy.clip_gradients`."""
        return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm).item()

    def is_finite(self, module: ScoringModule) -> bool:
        """See `DistributedStrategy.is_finite`."""
        return all(bool(parameter.isfinite().all()) for parameter in module.parameters())

    def tensor_specs(self, module: ScoringModule) -> list[TensorSpec]:
        """See `DistributedStrategy.tensor_specs`."""
        return [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in self.full_tensors(module)]

    def full_tensors(self, module: ScoringModule) -> Iterator[tuple[str, torch.Tensor]]:
        """See `DistributedStrategy.full_tensors`."""
        yield from ((name, p.detach()) for name, p in hf_model(module).named_parameters())

    @torch.no_grad()
    def load_tensors(self, module: ScoringModule, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `DistributedStrategy.load_tensors`."""
        own = dict(hf_model(module).named_parameters())
        for name, tensor in tensors:
            own[name].copy_(tensor)

    def save(self, state: TrainState, folder: Path) -> Future[Any]:
        """See `DistributedStrategy.save`."""
        return self._save(state, folder, None)

    def load(self, state: TrainState, folder: Path) -> None:
        """See `DistributedStrategy.load`."""
        self._load(state, folder, None)

    def export(self, module: ScoringModule, folder: Path) -> None:
        """See `DistributedStrategy.export`."""
        hf_model(module).save_pretrained(folder)
