"""A tiny model for all differential tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.models.tiny import tiny_qwen3, train_tokenizer


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a two-layer Qwen3 and its tokenizer."""
    conversation = [{"role": "user", "content": "1 22 333 4444"}, {"role": "assistant", "content": "one two three"}]
    tokenizer = train_tokenizer([conversation])
    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer.save_pretrained(folder)
    tiny_qwen3(tokenizer, seed=0).save_pretrained(folder)
    return folder
