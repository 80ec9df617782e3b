"""The embedded engine of a run."""

from __future__ import annotations

from skyrl_train.inference_engines.hf.engine import HFEngine
from skyrl_train.inference_engines.setup import EngineSetup


def start(setup: EngineSetup) -> HFEngine:
    """Create the engine of the policy `setup.model`. It owns the model if it has the process to itself."""
    generator = setup.cfg.generator
    assert setup.model is not None
    return HFEngine(
        setup.model,
        setup.tokenizer,
        max_num_seqs=generator.max_num_seqs,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        max_cache_bytes=setup.usable_bytes,
        bf16=setup.cfg.trainer.bf16,
        executor=setup.executor,
        owns_model=setup.executor is None,
    )
