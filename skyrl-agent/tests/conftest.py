from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_kit.containers import DockerStandIn, create_docker, podman_image
from train_kit.fixtures import *  # noqa: F403

from skyrl_agent.workspaces import LocalWorkspace


@pytest.fixture
def docker(tmp_path: Path) -> DockerStandIn:
    return create_docker(tmp_path / "docker")


@pytest.fixture
def local_workspace() -> Iterator[LocalWorkspace]:
    workspace = LocalWorkspace()
    workspace.start()
    yield workspace
    workspace.close()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with podman_image(tmp_path_factory.mktemp("workspaces")) as name:
        yield name
