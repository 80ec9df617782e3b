"""Shared fixtures: a tiny language model with a tokenizer trained on games of Catch, and a short run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import skyrl_gym
from examples.catch.catch_dataset import CatchDataset, write_dataset
from examples.catch.main_catch import register_catch
from examples.catch.players import conversation, random_player
from skyrl_train.models.loading import load_model, load_tokenizer
from skyrl_train.models.tiny import tiny_qwen3, train_tokenizer


@pytest.fixture(scope="session")
def tiny_head_dim() -> int:
    """Dimension of an attention head of the tiny model."""
    return 16


@pytest.fixture(scope="session")
def tiny_model_path(tiny_head_dim: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a two-layer Qwen3 and its tokenizer."""
    player = random_player(seed=0)
    tokenizer = train_tokenizer(conversation(row, player) for row in CatchDataset(train_size=50).train_rows())
    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer.save_pretrained(folder)
    tiny_qwen3(tokenizer, seed=0, head_dim=tiny_head_dim).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `tiny_model_path`."""
    return load_tokenizer(str(tiny_model_path))


@pytest.fixture(scope="session")
def tiny_model(tiny_model_path: Path) -> PreTrainedModel:
    """The model of `tiny_model_path`, shared by all tests; copy it before changing its weights."""
    return load_model(str(tiny_model_path), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def catch() -> Iterator[None]:
    """Register the environment `catch`."""
    register_catch()
    yield
    skyrl_gym.envs.deregister("catch")


@pytest.fixture(scope="session")
def catch_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training file of 8 rows and a validation file of 4."""
    folder = tmp_path_factory.mktemp("catch-data")
    write_dataset(CatchDataset(train_size=8, test_size=4), folder)
    return folder


@pytest.fixture
def catch_run(catch: None, catch_data: Path, tiny_model_path: Path, tmp_path: Path) -> list[str]:
    """Overrides for a run of two steps that writes `skyrl/test_run` in `tmp_path`."""
    return [
        f"data.train_data=['{catch_data}/train.parquet']",
        f"data.val_data=['{catch_data}/validation.parquet']",
        f"trainer.policy.model.path='{tiny_model_path}'",
        f"trainer.output_dir='{tmp_path}'",
        "trainer.run_name=test_run",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "trainer.logger=jsonl",
        "generator.max_turns=5",
        "generator.sampling_params.max_generate_length=1",
    ]
