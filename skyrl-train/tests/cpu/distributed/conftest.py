"""Rank processes and models that the tests of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from train_kit.ranks import SharedRanks
from train_kit.strategies import Strategies


@pytest.fixture(scope="module")
def shared_ranks() -> Iterator[dict[str, SharedRanks]]:
    """Ranks for each strategy. They end with the module, because tests in other folders count processes."""
    groups = {"fsdp2": SharedRanks(), "megatron": SharedRanks("skyrl_train.distributed.megatron")}
    yield groups
    for group in groups.values():
        group.close()


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def strategies(shared_ranks: dict[str, SharedRanks], tmp_path: Path, models_folder: Path) -> Iterator[Strategies]:
    with Strategies(shared_ranks, tmp_path, models_folder) as strategies:
        yield strategies
