"""The settings of the backend on JAX, `--backend-config '{"dtype": "bfloat16"}'`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tx.models.config import ModelConfig

logger = logging.getLogger(__name__)

MOST_CACHE_TOKENS = 1 << 17


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


class JaxConfig(BaseModel):
    """All have defaults that fit a small machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the base model and of what is computed; adapters are float32."""
    gradient_checkpointing: bool = False
    """Compute layers twice in training, and keep less of them."""
    micro_batch_tokens: int = Field(2048, ge=1)
    """Tokens of a micro-batch, with padding; a longer sequence is one by itself. Accelerators want more."""
    fully_sharded_data_parallel_size: int = Field(1, ge=1)
    """Devices among which weights, and rows in training, are divided."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Devices among which heads and hidden units are divided."""
    sample_lanes: int = Field(16, ge=1)
    """Samples in one batch, whose size is fixed."""
    sample_groups: int = Field(8, ge=1)
    """Batches of samples at most; more samples wait."""
    cache_gib: float = Field(2.0, gt=0)
    """Memory for keys and values of samples."""
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

    def cache_tokens(self, model: ModelConfig, itemsize: int) -> int:
        """How many tokens fit in there."""
        n_bytes = 2 * model.n_layers * model.n_kv_heads * model.head_size * itemsize
        return min(MOST_CACHE_TOKENS, int(self.cache_gib * (1 << 30)) // n_bytes)
