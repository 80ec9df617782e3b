from __future__ import annotations

from pathlib import Path

import pytest
from tx_engine import write_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder
