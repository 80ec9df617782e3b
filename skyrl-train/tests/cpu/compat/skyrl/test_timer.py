import time

import pytest

from skyrl_train.compat.skyrl.timer import Timer


async def test_the_timer_of_skyrl_adds_to_a_dictionary(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "skyrl_train.compat.skyrl.timer")
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
