from __future__ import annotations

from pathlib import Path

import pytest
from tx_tiny_models import FAMILIES, new_model


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each kind of model."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for each kind of model."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        new_model(family).save_pretrained(folder / family)
    return folder


@pytest.fixture(scope="session")
def folder(models: Path, family: str) -> Path:
    """The folder of a model of each kind."""
    return models / family
