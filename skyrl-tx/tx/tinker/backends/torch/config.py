"""The settings of the backend on PyTorch, `--backend torch --backend-config '{"dtype": "bfloat16"}'`."""

from __future__ import annotations

from pydantic import Field

from tx.tinker.backends.config import BackendConfig


class TorchConfig(BackendConfig):
    """Those of every backend, and these."""

    device: str | None = None
    """Where to compute, e.g. `cuda:1`; without it, on the first GPU where there is one, else on the CPU."""
    sample_lanes: int | None = Field(None, ge=1)
    """Samples in one batch, whose size is fixed; without it, 16 on a CPU and 64 on a GPU."""
