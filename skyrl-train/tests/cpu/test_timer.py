import time
from contextlib import ExitStack

import numpy as np
import pytest

from skyrl_train.timer import StepTimer, peak_memory


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
    assert "timing/eval" in timer.metrics()


def test_a_stage_has_the_peak_memory_of_its_own_code_and_of_the_stages_inside() -> None:
    timer = StepTimer()
    with timer("step"):
        with timer("generate"):
            np.ones(25_000_000)  # 200 MB
        with timer("policy_train"):
            np.ones(50_000_000)  # 400 MB
        with timer("sync_weights"):
            pass
    peaks = timer.metrics()
    rest = peaks["memory/sync_weights"]
    assert peaks["memory/generate"] - rest == pytest.approx(0.2, abs=0.01)
    assert peaks["memory/policy_train"] - rest == pytest.approx(0.4, abs=0.01)
    assert peaks["memory/step"] == peaks["memory/policy_train"]


def test_overlapping_stages_share_a_peak() -> None:
    sizes: dict[str, float] = {}
    update, rollout = peak_memory(sizes, "update"), peak_memory(sizes, "rollout")
    with ExitStack() as stack:
        stack.enter_context(update)
        with rollout:
            np.ones(25_000_000)
    assert sizes["update"] == sizes["rollout"]
