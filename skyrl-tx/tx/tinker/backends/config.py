"""The settings that every backend has, `--backend-config '{"dtype": "bfloat16"}'`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_CACHE_TOKENS = 1 << 17


class BackendConfig(BaseModel):
    """All have defaults that fit a small machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the base model and of what is computed; adapters are float32."""
    gradient_checkpointing: bool = False
    """Compute layers twice in training, and keep less of them."""
    micro_batch_tokens: int = Field(2048, ge=1)
    """Tokens of a micro-batch, with padding; a longer sequence is one by itself. Accelerators want more."""
    sample_groups: int = Field(8, ge=1)
    """Batches of samples at most; more samples wait."""
    cache_gib: float = Field(2.0, gt=0)
    """Memory for keys and values of samples."""

    def cache_tokens(self, bytes_per_token: int) -> int:
        """How many tokens fit in there."""
        return min(MOST_CACHE_TOKENS, int(self.cache_gib * (1 << 30)) // bytes_per_token)
