"""One rank: the model as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from skyrl_train.distributed.strategy import DistributedStrategy, hf_model
from skyrl_train.models.scoring_module import ScoringModule


class SingleStrategy(DistributedStrategy):
    """Keeps the whole model on one device."""

    def _wrap(self, module: ScoringModule) -> ScoringModule:
        return module

    def _release_gathered(self, module: ScoringModule) -> None:
        """Nothing is ever gathered."""

    def clip_gradients(self, module: ScoringModule, max_norm: float) -> float:
        return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm).item()

    def is_finite(self, module: ScoringModule) -> bool:
        return all(bool(parameter.isfinite().all()) for parameter in module.parameters())

    def full_tensors(self, module: ScoringModule) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, parameter.detach()) for name, parameter in hf_model(module).named_parameters())

    @torch.no_grad()
    def load_tensors(self, module: ScoringModule, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(hf_model(module).named_parameters())
        for name, tensor in tensors:
            own[name].copy_(tensor)

    def export(self, module: ScoringModule, folder: Path) -> None:
        hf_model(module).save_pretrained(folder)
