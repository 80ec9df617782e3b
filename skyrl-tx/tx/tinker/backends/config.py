"""Settings of the backends, `--backend-config '{"dtype": "bfloat16"}'`."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

logger = logging.getLogger(__name__)

MAX_CACHE_TOKENS = 1 << 17
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
"""Settings of SkyRL's backend that the JAX backend does not need."""


class BaseBackendConfig(BaseModel):
    """Settings with defaults that fit a small machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the base model and of computations. Adapters are float32."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass to save memory."""
    micro_batch_tokens: int = Field(2048, ge=1)
    """Maximum tokens per micro-batch, with padding. A longer sequence gets its own. Increase it on accelerators."""
    sample_groups: int = Field(8, ge=1)
    """Maximum number of concurrent batches of samples. More samples wait."""
    cache_gib: float = Field(2.0, gt=0)
    """KV cache memory for samples, in GiB."""

    def cache_tokens(self, bytes_per_token: int) -> int:
        """Return how many tokens fit into the cache."""
        return min(MAX_CACHE_TOKENS, int(self.cache_gib * (1 << 30)) // bytes_per_token)


def user_cache() -> Path:
    """Return the user's cache folder for compiled programs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyrl-tx" / "programs"


class JaxConfig(BaseBackendConfig):
    """Common settings and JAX-specific ones."""

    fully_sharded_data_parallel_size: int = Field(1, ge=1)
    """Number of devices that share the weights, and rows in training."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of devices that share the heads and hidden units."""
    sample_lanes: int = Field(16, ge=1)
    """Number of samples in a batch. The batch size is fixed."""
    compile_cache: Path | None = Field(default_factory=user_cache)
    """Folder where compiled programs are cached for later starts. null disables the cache."""

    @model_validator(mode="before")
    @classmethod
    def _drop_unneeded(cls, settings: Any) -> Any:
        if not isinstance(settings, Mapping):
            return settings
        for name in sorted(UNNEEDED & settings.keys()):
            logger.info("backend_config: %s=%r is ignored: this backend does not need it", name, settings[name])
        return {name: value for name, value in settings.items() if name not in UNNEEDED}


class TorchConfig(BaseBackendConfig):
    """Common settings and PyTorch-specific ones."""

    device: str | None = None
    """The device, e.g. `cuda:1`. Defaults to the first GPU, or the CPU."""
    sample_lanes: int | None = Field(None, ge=1)
    """Number of samples in a batch. The batch size is fixed. Defaults to 16 on a CPU and 64 on a GPU."""
