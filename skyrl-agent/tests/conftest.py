from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_kit.containers import DockerStandIn, create_docker, podman_image


@pytest.fixture
def docker(tmp_path: Path) -> DockerStandIn:
    """A stand-in for Docker with an empty image."""
    return create_docker(tmp_path / "docker")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image of Podman."""
    with podman_image(tmp_path_factory.mktemp("workspaces")) as name:
        yield name
