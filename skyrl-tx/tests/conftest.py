from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # before JAX is imported

import pytest
from tx_kit.databases import ABSENT, TEST_URL, postgresql, programs
from tx_kit.models import FAMILIES, new_model
from tx_kit.servers import CHILD_ENVIRONMENT


@pytest.fixture(scope="session", autouse=True)
def _programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cache compiled programs for the duration of the tests, in this process and its children."""
    folder = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        for environment in (os.environ, CHILD_ENVIRONMENT):
            patch.setitem(environment, "XDG_CACHE_HOME", folder)
        yield


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each model family."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model per family."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        new_model(family).save_pretrained(folder / family)
    return folder


@pytest.fixture(scope="session")
def folder(models: Path, family: str) -> Path:
    """The folder of a model, for each family."""
    return models / family


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """The URL of a PostgreSQL server: the one in TX_TEST_DATABASE_URL, or a temporary one."""
    if url := os.environ.get(TEST_URL):
        yield url
        return
    folder = programs()
    if folder is None:
        assert "CI" not in os.environ, ABSENT
        pytest.skip(ABSENT)
    with postgresql(folder) as url:
        yield url
