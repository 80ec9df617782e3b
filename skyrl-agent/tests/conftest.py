from __future__ import annotations

from pathlib import Path

import pytest
from agent_kit.containers import DockerStandIn, create_docker


@pytest.fixture
def docker(tmp_path: Path) -> DockerStandIn:
    """A stand-in for Docker with an empty image."""
    return create_docker(tmp_path / "docker")
