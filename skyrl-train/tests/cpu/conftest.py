"""A tiny language model for everyone: random weights, a tokenizer trained on a few games of Catch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.catch.catch_dataset import CatchDataset
from examples.catch.players import conversation, random_player
from skyrl_train.models.loading import load_model, load_tokenizer
from skyrl_train.models.tiny import tiny_qwen3, train_tokenizer


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a two-layer Qwen3 and its tokenizer."""
    player = random_player(seed=0)
    tokenizer = train_tokenizer(conversation(row, player) for row in CatchDataset(train_size=50).train_rows())
    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer.save_pretrained(folder)
    tiny_qwen3(tokenizer, seed=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `tiny_model_path`."""
    return load_tokenizer(str(tiny_model_path))


@pytest.fixture(scope="session")
def tiny_model(tiny_model_path: Path) -> PreTrainedModel:
    """The model of `tiny_model_path`, shared by all tests: copy it before you change its weights."""
    return load_model(str(tiny_model_path), dtype=torch.float32, device=torch.device("cpu"))
