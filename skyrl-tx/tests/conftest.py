from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # before JAX is there

import pytest
from tx_postgresql import ABSENT, TEST_URL, postgresql, programs
from tx_server import CHILD_ENVIRONMENT
from tx_tiny_models import FAMILIES, new_model


@pytest.fixture(scope="session", autouse=True)
def _programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled programs are kept for as long as the tests run, and for the processes that they start."""
    folder = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        for environment in (os.environ, CHILD_ENVIRONMENT):
            patch.setitem(environment, "XDG_CACHE_HOME", folder)
        yield


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


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """Of a PostgreSQL server: the one that TX_TEST_DATABASE_URL names, or one of the tests' own."""
    if told := os.environ.get(TEST_URL):
        yield told
        return
    folder = programs()
    if folder is None:
        assert "CI" not in os.environ, ABSENT
        pytest.skip(ABSENT)
    with postgresql(folder) as url:
        yield url
