"""The settings of the backend on JAX, `--backend-config '{"dtype": "bfloat16"}'`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from tx.tinker.backends.config import BackendConfig

logger = logging.getLogger(__name__)


def user_cache() -> Path:
    """The user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyrl-tx" / "programs"


NEEDLESS = frozenset(
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
"""What SkyRL's backend is told, and this one finds by itself."""


class JaxConfig(BackendConfig):
    """Those of every backend, and these."""

    fully_sharded_data_parallel_size: int = Field(1, ge=1)
    """Devices among which weights, and rows in training, are divided."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Devices among which heads and hidden units are divided."""
    sample_lanes: int = Field(16, ge=1)
    """Samples in one batch, whose size is fixed."""
    compile_cache: Path | None = Field(default_factory=user_cache)
    """Where compiled programs are kept for the next start; none for null."""

    @model_validator(mode="before")
    @classmethod
    def _without_needless(cls, told: Any) -> Any:
        if not isinstance(told, Mapping):
            return told
        for name in sorted(NEEDLESS & told.keys()):
            logger.info("backend_config: %s=%r is not needed here", name, told[name])
        return {name: value for name, value in told.items() if name not in NEEDLESS}
