"""Settings common to all backends, `--backend-config '{"dtype": "bfloat16"}'`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_CACHE_TOKENS = 1 << 17


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
