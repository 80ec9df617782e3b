"""Report the engine's state to the server, for validating requests and for the status page."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sqlalchemy import Engine as Database
from sqlalchemy import update
from sqlmodel import col

from tx.tinker.backends.base import Backend
from tx.tinker.db_models import STALLED, EngineState, now
from tx.tinker.engine.passes import Passes
from tx.tinker.engine.sampling import Sampling
from tx.tinker.store.database import writing


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


def report_alive(database: Database, base_model: str, **columns: object) -> None:
    """Report that a base model's engine is alive, whatever its loop is doing, and change other columns."""
    values = {"last_seen_at": now(), **columns}
    with writing(database) as session:
        session.exec(update(EngineState).where(col(EngineState.base_model) == base_model).values(values))


def status_of(backend: Backend, passes: Passes, sampling: Sampling, n_requests: Mapping[str, int]) -> dict[str, object]:
    """Return the counters for the status page."""
    return {
        "pid": os.getpid(),
        "requests": dict(n_requests),
        "tokens_trained": passes.n_tokens,
        "tokens_sampled": sampling.n_tokens,
        "models": sorted(backend.models()),
        STALLED: 0,
        "training": len(passes),
        "sampling": len(sampling),
        **backend.counts(),
    }
