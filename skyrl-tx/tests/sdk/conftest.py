"""Run real SDKs against real servers. `make test-tinker` creates an environment for each SDK."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tx_kit.processes import process
from tx_kit.sdk import ENVIRONMENTS, save_model, write_description

collect_ignore = ["client"]  # runs in the environments of the SDKs

FLAGS = {"qwen3": (), "llama": ("--compress-passes",)}
"""Model families, and the flags of their servers."""


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {family: save_model(family, base / "tiny" / family) for family in FLAGS}


@pytest.fixture(scope="session")
def urls(model_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    state = tmp_path_factory.mktemp("state")
    variables = {"XLA_FLAGS": "", "XDG_CACHE_HOME": str(ENVIRONMENTS / "cache")}  # not those of the tests
    with ExitStack() as stack:
        servers = {}
        for family, folder in model_folders.items():
            arguments = ("--base-model", str(folder), "--max-models=1000", *FLAGS[family])
            servers[family] = stack.enter_context(process(state / family, *arguments, **variables))
        for server in servers.values():
            server.wait_for_engine()
        yield {family: server.url for family, server in servers.items()}


@pytest.fixture(scope="session")
def descriptions(
    model_folders: dict[str, Path], urls: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Files for the tests in `client` that describe each server."""
    files = {}
    for family, folder in model_folders.items():
        file = tmp_path_factory.mktemp("server") / "server.json"
        is_compressing = "--compress-passes" in FLAGS[family]
        files[family] = write_description(file, folder, urls[family], is_compressing=is_compressing)
    return files
