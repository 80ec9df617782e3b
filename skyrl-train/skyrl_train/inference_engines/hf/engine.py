"""Create the embedded engine: packed where the model allows it, else with the model's own cache."""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Required, TypedDict, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.inference_engines.base import EngineSetup
from skyrl_train.inference_engines.hf.embedded import EmbeddedEngine
from skyrl_train.inference_engines.hf.general import GeneralEngine
from skyrl_train.inference_engines.hf.packed import PackedEngine
from skyrl_train.media.processing import has_vision
from skyrl_train.models.loading import default_device, load_model, load_tokenizer

logger = logging.getLogger(__name__)


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of `EmbeddedEngine`."""

    max_num_seqs: Required[int]
    max_num_batched_tokens: Required[int]
    max_cache_bytes: Required[int]
    bf16: bool
    executor: ThreadPoolExecutor | None
    owns_model: bool
    records_experts: bool


def create_engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Unpack[EngineOptions]
) -> EmbeddedEngine[Any]:
    """Return an engine that samples from `model`, packed if possible.

    Raises:
        ConfigError: `records_experts` is set, but the model has no experts or cannot be packed.
        EngineError: neither engine computes the hidden states of the model.
    """
    try:
        if has_vision(model.config):
            raise EngineError(f"a {type(model).__name__} reads images")
        return PackedEngine(model, tokenizer, **options)
    except EngineError as error:
        if options.get("records_experts"):
            raise ConfigError(
                f"trainer.algorithm.router_replay=true needs the packed engine, but {error}; set "
                "trainer.algorithm.router_replay=false"
            ) from error
        logger.info("Sequences are padded instead of packed, because %s", error)
    return GeneralEngine(model, tokenizer, **options)


def start(setup: EngineSetup) -> EmbeddedEngine[Any]:
    """Create a run's engine, with the policy `setup.model`. It owns the model if it has the process to itself."""
    generator = setup.cfg.generator
    assert setup.model is not None
    return create_engine(
        setup.model,
        setup.tokenizer,
        max_num_seqs=generator.max_num_seqs,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        max_cache_bytes=setup.usable_bytes,
        bf16=setup.cfg.trainer.bf16,
        executor=setup.executor,
        owns_model=setup.executor is None,
        records_experts=setup.cfg.trainer.algorithm.router_replay,
    )


def load_engine(path: str, *, dtype: torch.dtype, **options: Unpack[EngineOptions]) -> EmbeddedEngine[Any]:
    """Return an engine with its own copy of the model in a Hugging Face folder, e.g. in another process.

    Raises:
        ConfigError: the model or its tokenizer cannot be loaded.
        EngineError: the embedded engine does not support the model.
    """
    model = load_model(path, dtype=dtype, device=default_device())
    return create_engine(model, load_tokenizer(path), **options | {"owns_model": True})
