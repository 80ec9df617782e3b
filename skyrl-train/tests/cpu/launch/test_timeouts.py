"""Weight syncs that must end before the ranks of the policy give up."""

from __future__ import annotations

from datetime import timedelta

import pytest

from skyrl_train.launch.timeouts import find_long_sync


@pytest.mark.parametrize(("timeout_s", "n_problems"), [(30.0, 0), (30.5, 1), (300.0, 1)])
def test_a_sync_that_takes_longer_than_the_ranks_wait_is_a_problem(timeout_s: float, n_problems: int) -> None:
    assert len(list(find_long_sync(timeout_s, timedelta(seconds=60)))) == n_problems
