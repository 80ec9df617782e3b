import logging

import pytest
from tx_kit.models import new_model

from tx.models.config import config_of
from tx.tinker.backends.config import MAX_CACHE_TOKENS, JaxConfig


def test_keys_of_skyrls_backend_are_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = JaxConfig.model_validate({"max_lora_adapters": 4, "gradient_checkpointing": True})
    assert config.gradient_checkpointing
    assert caplog.messages == ["backend_config: max_lora_adapters=4 is ignored: this backend does not need it"]


def test_the_cache_uses_the_configured_memory() -> None:
    shape = config_of(new_model("qwen3").config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]})
    n_bytes = 2 * shape.n_layers * 2 * 16 * 4  # keys and values, layers, heads, head size, float32
    assert JaxConfig(cache_gib=1e-3).cache_tokens(shape.cache_bytes(4)) == int(1e-3 * (1 << 30)) // n_bytes
    assert JaxConfig(cache_gib=1e3).cache_tokens(shape.cache_bytes(4)) == MAX_CACHE_TOKENS
