"""The strategy for a single rank with the whole model."""

from __future__ import annotations

from pathlib import Path

from skyrl_train.distributed.hugging_face import HuggingFaceStrategy
from skyrl_train.distributed.strategy import all_finite
from skyrl_train.models.generation import save_model
from skyrl_train.models.lora import adapter_config, merged_buffers
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.types.specs import ModelSpec


class SingleStrategy(HuggingFaceStrategy):
    """A strategy that keeps the whole model on one device."""

    def _wrap(self, module: ScoringModule, spec: ModelSpec) -> ScoringModule:
        return module

    def is_finite(self, module: ScoringModule) -> bool:
        return all_finite(module.parameters())

    def export(self, module: ScoringModule, folder: Path) -> None:
        model = module.hf_model
        differs = adapter_config(model) is not None or module.export_dtypes
        save_model(model, folder, dict(self.full_tensors(module)) | merged_buffers(model) if differs else None)
