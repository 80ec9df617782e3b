from __future__ import annotations

import pytest

from skyrl_gym.adapters.openenv import schema

pytest.register_assert_rewrite("adapters.openenv.contract")


@pytest.fixture(autouse=True)
def clear_schemas() -> None:
    """Clear the cache, since a server of another test may have had the same port."""
    schema._schemas.clear()
