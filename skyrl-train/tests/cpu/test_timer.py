import time

import pytest

from skyrl_train.timer import StepTimer, Timer


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


async def test_the_timer_of_skyrl_adds_to_a_dictionary(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "skyrl_train.timer")
    seconds = {"reward": 1.0}
    with Timer("reward", seconds):
        time.sleep(0.01)
    async with Timer("judge", seconds):
        time.sleep(0.01)
    with Timer("unused"):
        pass
    assert seconds["reward"] >= 1.01
    assert seconds["judge"] >= 0.01
    assert [message.partition(" in ")[0] for message in caplog.messages[:2]] == ["Started: reward", "Finished: reward"]
