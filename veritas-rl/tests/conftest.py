from collections.abc import Iterator
from pathlib import Path

import pytest
from veritas_kit.datasets import generate
from veritas_kit.endpoints import ServedModel, serving_model
from veritas_kit.recipes import Recipes, copy_recipes


@pytest.fixture(scope="session")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Recipes:
    """A copy of the recipes, in which scripts may write."""
    return copy_recipes(tmp_path_factory.mktemp("workspace"))


@pytest.fixture
def generated(tmp_path: Path) -> Path:
    """A file of eight puzzles with answers."""
    path = tmp_path / "lgc-v2/generated/tasks.jsonl"
    assert generate(path, 8) == 0
    return path


@pytest.fixture
def served_model() -> Iterator[ServedModel]:
    with serving_model() as model:
        yield model
