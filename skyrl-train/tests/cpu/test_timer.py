import time

import pytest

from skyrl_train.timer import StepTimer


def test_seconds_add_up_by_name() -> None:
    timer = StepTimer()
    for _ in range(2):
        with timer("step"), timer("generate"):
            time.sleep(0.01)
    taken = timer.metrics()
    assert taken["timing/step"] >= taken["timing/generate"] >= 0.02
    assert StepTimer().metrics() == {}


def test_a_block_that_raises_is_timed() -> None:
    timer = StepTimer()
    with pytest.raises(ValueError, match="no"), timer("eval"):
        raise ValueError("no")
    assert list(timer.metrics()) == ["timing/eval"]
