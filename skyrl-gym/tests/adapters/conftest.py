from __future__ import annotations

import pytest

from skyrl_gym.adapters import openenv_schema

pytest.register_assert_rewrite("adapters.openenv_contract")


@pytest.fixture(autouse=True)
def no_schemas() -> None:
    """A server of another test may have had the same port."""
    openenv_schema._schemas.clear()
