"""Settings of the JAX backend, `--backend-config '{"dtype": "bfloat16"}'`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from tx.tinker.backends.config import BaseBackendConfig

logger = logging.getLogger(__name__)


def user_cache() -> Path:
    """Return the user's cache folder for compiled programs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyrl-tx" / "programs"


UNNEEDED = frozenset(
    {
        "enforce_eager",
        "expert_parallel_size",
        "loss_chunk_size",
        "max_lora_adapters",
        "max_lora_rank",
        "mhc_expansion_rate",
        "sample_max_num_sequences",
        "shard_attention_heads",
        "train_micro_batch_size",
    }
)
"""Settings of SkyRL's backend that this backend does not need."""


class JaxConfig(BaseBackendConfig):
    """Common settings and JAX-specific ones."""

    fully_sharded_data_parallel_size: int = Field(1, ge=1)
    """Number of devices that share the weights, and rows in training."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of devices that share the heads and hidden units."""
    sample_lanes: int = Field(16, ge=1)
    """Number of samples in a batch. The batch size is fixed."""
    compile_cache: Path | None = Field(default_factory=user_cache)
    """Folder of compiled programs for later starts. null disables it."""

    @model_validator(mode="before")
    @classmethod
    def _drop_unneeded(cls, settings: Any) -> Any:
        if not isinstance(settings, Mapping):
            return settings
        for name in sorted(UNNEEDED & settings.keys()):
            logger.info("backend_config: %s=%r is ignored: this backend does not need it", name, settings[name])
        return {name: value for name, value in settings.items() if name not in UNNEEDED}
