"""The garbage collector while a run works."""

from __future__ import annotations

import gc

from skyrl_train.entrypoints.runtime import collect_rarely


def test_the_garbage_collector_is_as_it_was() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with collect_rarely():
        assert gc.get_threshold()[0] > before[0][0]
        assert gc.get_freeze_count() > before[1]
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
