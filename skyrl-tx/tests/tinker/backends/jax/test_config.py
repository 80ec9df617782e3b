from __future__ import annotations

import logging

import pytest
from pydantic import ValidationError
from tx_tiny_models import new_model

from tx.models.config import config_of
from tx.tinker.backends.config import MOST_CACHE_TOKENS
from tx.tinker.backends.jax.config import JaxConfig


def test_keys_of_other_servers_are_told_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = JaxConfig.model_validate({"max_lora_adapters": 4, "gradient_checkpointing": True})
    assert config.gradient_checkpointing
    assert caplog.messages == ["backend_config: max_lora_adapters=4 is not needed here"]


def test_keys_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ValidationError, match="sample_lane"):
        JaxConfig.model_validate({"sample_lane": 4})


def test_the_cache_takes_as_much_memory_as_it_may() -> None:
    shape = config_of(new_model("qwen3").config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]})
    n_bytes = 2 * shape.n_layers * 2 * 16 * 4  # keys and values, layers, heads, their size, float32
    assert JaxConfig(cache_gib=1e-3).cache_tokens(shape.cache_bytes(4)) == int(1e-3 * (1 << 30)) // n_bytes
    assert JaxConfig(cache_gib=1e3).cache_tokens(shape.cache_bytes(4)) == MOST_CACHE_TOKENS
