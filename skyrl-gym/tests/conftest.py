from __future__ import annotations

from collections.abc import Iterator

import pytest

from skyrl_gym.envs.registration import registry


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Every test starts from an empty registry and leaves behind the one it found."""
    before = dict(registry)
    registry.clear()
    yield
    registry.clear()
    registry.update(before)
