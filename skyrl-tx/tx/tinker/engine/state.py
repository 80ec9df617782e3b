"""Report the engine's state to the server, which validates requests with it, and to the status page."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tx.tinker.backends.base import Backend
from tx.tinker.db_models import EngineState
from tx.tinker.engine.passes import Passes
from tx.tinker.engine.sampling import Sampling


def describe(backend: Backend) -> EngineState:
    """Describe the base model."""
    base = backend.base_model
    return EngineState(
        base_model=base.name,
        vocab_size=base.vocab_size,
        max_context=base.max_context,
        eos_ids=list(base.eos_ids),
        can_train_all=base.can_train_all,
        has_tokenizer=(base.folder / "tokenizer.json").is_file(),
    )


def status_of(backend: Backend, passes: Passes, sampling: Sampling, n_requests: Mapping[str, int]) -> dict[str, object]:
    """Return the counters for the status page."""
    return {
        "pid": os.getpid(),
        "requests": dict(n_requests),
        "tokens_trained": passes.n_tokens,
        "tokens_sampled": sampling.n_tokens,
        "models": sorted(backend.models()),
        "training": len(passes),
        "sampling": len(sampling),
        **backend.counts(),
    }
