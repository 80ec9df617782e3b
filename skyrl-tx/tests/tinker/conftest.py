from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine as Database
from tx_kit.engines import write_model
from tx_kit.servers import config_for

from tx.tinker.store.database import open_database


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """The database of a server that is not running."""
    opened = open_database(config_for(tmp_path).database_url)
    yield opened
    opened.dispose()
