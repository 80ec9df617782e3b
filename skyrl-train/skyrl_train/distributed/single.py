"""A single rank with the whole model."""

from __future__ import annotations

from pathlib import Path

from skyrl_train.distributed.strategy import DistributedStrategy, hf_model
from skyrl_train.models.scoring_module import ScoringModule


class SingleStrategy(DistributedStrategy):
    """A strategy that keeps the whole model on one device."""

    def _wrap(self, module: ScoringModule) -> ScoringModule:
        return module

    def is_finite(self, module: ScoringModule) -> bool:
        return all(bool(parameter.isfinite().all()) for parameter in module.parameters())

    def export(self, module: ScoringModule, folder: Path) -> None:
        hf_model(module).save_pretrained(folder)
