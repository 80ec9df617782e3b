from __future__ import annotations

from pathlib import Path

import pytest

from tx.models.config import LoraConfig
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.backends.jax.config import JaxConfig
from tx.tinker.backends.models import Models
from tx.tinker.types import UserError


def test_a_missing_model() -> None:
    models: Models[int] = Models(a=1)
    assert models["a"] == 1
    with pytest.raises(UserError, match="there is no model b; it was unloaded, or never created"):
        models["b"]
    with pytest.raises(UserError, match="model a already exists"):
        models.check_new("a")


def test_an_adapter_with_nothing_to_train_is_refused(models: Path) -> None:
    backend = JaxBackend(models / "qwen3", "tiny", JaxConfig())
    head_alone = LoraConfig(rank=4, train_attn=False, train_mlp=False)
    with pytest.raises(UserError, match="this qwen3 model has nothing to train with train_unembed"):
        backend.create_model("a", head_alone)  # the head is tied to the embeddings
    assert not backend.models()
