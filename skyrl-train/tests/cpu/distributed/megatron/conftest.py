"""Models, adapters and rank processes that the tests of Megatron-Core share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from train_kit.megatron import MODELS
from train_kit.models import create_model, load_on_cpu
from train_kit.ranks import SharedRanks

from skyrl_train.config.policy import LoraConfig
from skyrl_train.models.lora import add_adapter, save_adapter, trained_parameters
from skyrl_train.types.specs import LoraSpec


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[SharedRanks]:
    """Ranks of processes that have imported Megatron-Core."""
    groups = SharedRanks("skyrl_train.distributed.megatron")
    yield groups
    groups.close()


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of models with random weights."""
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in folders.items():
        create_model(MODELS[name]).save_pretrained(folder)
    return folders


@pytest.fixture(scope="session")
def adapters(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of adapters with random weights."""
    folders = {}
    for name, path in paths.items():
        model = load_on_cpu(path)
        add_adapter(model, LoraSpec(LoraConfig(rank=3, alpha=12), "lora", str(path)))
        tensors = trained_parameters(model)
        generator = torch.Generator().manual_seed(1)
        for tensor in tensors.values():
            tensor.data.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
        folders[name] = tmp_path_factory.mktemp("adapter")
        save_adapter(model, tensors, str(path), folders[name])
    return folders
