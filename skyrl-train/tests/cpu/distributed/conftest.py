"""Rank processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from train_kit.ranks import SharedRanks

from skyrl_train.launch.process import ProcessRank


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[SharedRanks]:
    groups = SharedRanks()
    yield groups
    groups.close()


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.nightly)], ids="{}_ranks".format)
def ranks(request: pytest.FixtureRequest, shared_ranks: SharedRanks) -> Iterator[list[ProcessRank]]:
    """Two or four ranks; some tests ask for a number by `indirect=True`."""
    with shared_ranks.borrow(request.param) as group:
        yield group


@pytest.fixture
def two_ranks(shared_ranks: SharedRanks) -> Iterator[list[ProcessRank]]:
    with shared_ranks.borrow(2) as group:
        yield group
