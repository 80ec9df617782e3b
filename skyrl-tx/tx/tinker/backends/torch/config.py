"""Settings of the PyTorch backend, `--backend torch --backend-config '{"dtype": "bfloat16"}'`."""

from __future__ import annotations

from pydantic import Field

from tx.tinker.backends.config import BaseBackendConfig


class TorchConfig(BaseBackendConfig):
    """Common settings and PyTorch-specific ones."""

    device: str | None = None
    """The device, e.g. `cuda:1`. Defaults to the first GPU, or the CPU."""
    sample_lanes: int | None = Field(None, ge=1)
    """Number of samples in a batch. The batch size is fixed. Defaults to 16 on a CPU and 64 on a GPU."""
