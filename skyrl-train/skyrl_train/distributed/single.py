"""A single rank with the whole model."""

from __future__ import annotations

from pathlib import Path

from skyrl_train.distributed.hugging_face import HuggingFaceStrategy
from skyrl_train.distributed.strategy import all_finite
from skyrl_train.models.lora import adapter_config
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
        if adapter_config(model) is None:
            model.save_pretrained(folder)
        else:
            model.save_pretrained(folder, state_dict=dict(self.full_tensors(module)))
