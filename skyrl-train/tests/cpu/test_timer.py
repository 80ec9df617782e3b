"""Seconds add up under their names."""

from __future__ import annotations

import time

import pytest

from skyrl_train.timer import StepTimer


def test_seconds_add_up() -> None:
    timer = StepTimer()
    for _ in range(2):
        with timer("step"), timer("generate"):
            time.sleep(0.01)
    taken = timer.metrics()
    assert taken["timing/step"] >= taken["timing/generate"] >= 0.02
    assert StepTimer().metrics() == {}


def test_an_error_is_timed_and_passes_through() -> None:
    timer = StepTimer()
    with pytest.raises(ValueError, match="no"), timer("eval"):
        raise ValueError("no")
    assert list(timer.metrics()) == ["timing/eval"]
