"""Inputs for starting an engine."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.config import SkyRLConfig


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Configuration, tokenizer, model and memory budget for an engine."""

    cfg: SkyRLConfig
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel | None = None
    """The policy, for the embedded engine."""
    usable_bytes: int = 0
    """Memory for everything that the engine holds, its own weights included."""
    total_bytes: int = 1
    """Memory of the device."""
    executor: ThreadPoolExecutor | None = None
    """The thread that computes, or None if the engine has the process to itself."""


def weight_folder(cfg: SkyRLConfig) -> Path:
    """Return the folder through which engines that read files get new weights."""
    return Path(cfg.trainer.run_dir) / "engine_weights"
