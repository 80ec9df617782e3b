import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

# Before JAX is imported. Without LLVM's optimizations, programs of tiny models compile twice as fast.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0")

import httpx
import jax
import pytest
from sqlalchemy import Engine as Database
from tx_kit.databases import ABSENT, TEST_URL, find_programs, new_database_url, postgresql
from tx_kit.engines import Desk
from tx_kit.models import FAMILIES, new_model, save_minimal_model
from tx_kit.servers import Running, config_for, serving

from tx.tinker.backends.config import user_cache
from tx.tinker.backends.jax.programs import cache_programs, programs
from tx.tinker.store.database import open_database

MAX_PROGRAMS, MAX_PROGRAMS_OF_MODULE = 100, 20
"""Number of programs in memory after a test and after a module, of about 6 MB each."""


@pytest.fixture(scope="session", autouse=True)
def _compiled_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the programs that JAX compiles, for all processes of this run and for later runs; `make clean` deletes them.

    A program's key is its code, so a change of the product compiles it again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(request.config.cache.mkdir("skyrl-tx")))
        cache_programs(user_cache())
        yield


@pytest.fixture(scope="session")
def _freed() -> list[int]:
    """The number of programs when they were freed last."""
    return [0]


def _free_programs(freed: list[int], max_programs: int) -> None:
    """Free the programs in memory if there are many of them; those that are needed again are read from the cache."""
    is_in_use = any(thread.name == "engine" for thread in threading.enumerate())
    if programs().n_compiled > freed[-1] + max_programs and not is_in_use:
        freed.append(programs().n_compiled)
        jax.clear_caches()
        gc.collect()
        if os.uname().sysname == "Linux":
            ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(autouse=True)
def _memory(_freed: list[int]) -> Iterator[None]:
    yield
    _free_programs(_freed, MAX_PROGRAMS)


@pytest.fixture(scope="module", autouse=True)
def _memory_of_module(_freed: list[int]) -> Iterator[None]:
    """Later modules, also of other packages, seldom use the programs of this one."""
    yield
    _free_programs(_freed, MAX_PROGRAMS_OF_MODULE)


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
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
    return models / family


@pytest.fixture(scope="session")
def shallow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Qwen3 model with a single layer."""
    folder = tmp_path_factory.mktemp("shallow")
    new_model("qwen3", n_layers=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def minimal_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model that engines serve."""
    folder = tmp_path_factory.mktemp("minimal")
    save_minimal_model(folder)
    return folder


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """The URL of a PostgreSQL server: the one in TX_TEST_DATABASE_URL, or a temporary one."""
    if url := os.environ.get(TEST_URL):
        yield url
        return
    folder = find_programs()
    if folder is None:
        assert "CI" not in os.environ, ABSENT
        pytest.skip(ABSENT)
    with postgresql(folder) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def each_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty SQLite database, then of one in PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new/folder/tinker.db"
    return new_database_url(request.getfixturevalue("postgresql_url"))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """The database of a server that is not running."""
    opened = open_database(config_for(tmp_path).database_url)
    yield opened
    opened.dispose()


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server without an engine's computations, with the module's SERVER_SETTINGS if it has any."""
    settings = getattr(request.module, "SERVER_SETTINGS", {})
    with serving(tmp_path_factory.mktemp("state"), **settings) as running:
        yield running


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    """A client of the module's server."""
    with server.client() as client:
        yield client


@pytest.fixture
def new_desk(tmp_path: Path, minimal_model: Path) -> Iterator[Callable[..., Desk]]:
    """Opens desks with an engine on JAX, and closes them after the test."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(closing(Desk(tmp_path, minimal_model, **settings)))


@pytest.fixture
def desk(new_desk: Callable[..., Desk]) -> Desk:
    return new_desk()


@pytest.fixture
def model(desk: Desk) -> str:
    """A model at the desk, which has taken a step."""
    name = desk.model()
    desk.train(name, [1, 2, 5])
    desk.work()
    return name
