"""Load an embedded engine with its own copy of a model."""

from __future__ import annotations

import torch

from skyrl_train.inference_engines.hf.engine import HFEngine
from skyrl_train.models.loading import default_device, load_model, load_tokenizer


def load_engine(
    path: str,
    *,
    dtype: torch.dtype,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_cache_bytes: int,
    bf16: bool = False,
) -> HFEngine:
    """Return an engine for the model in a Hugging Face folder, e.g. to run in another process.

    Raises:
        ConfigError: the model or its tokenizer cannot be loaded.
        EngineError: the embedded engine does not support the model.
    """
    return HFEngine(
        load_model(path, dtype=dtype, device=default_device()),
        load_tokenizer(path),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_cache_bytes=max_cache_bytes,
        bf16=bf16,
    )
