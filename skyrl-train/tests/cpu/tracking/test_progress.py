import contextlib
import io
import os
import pty
import re
import termios
import time

import pytest

from skyrl_train.tracking import Progress

REWARD, SPEED, N_FAILED = "reward/avg_raw_reward", "trainer/tokens_per_second", "generate/n_invalid"


def test_a_log_file_gets_plain_lines_at_limited_frequency(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 0.5, 1.0, 6.0, 7.0, 10.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    stream = io.StringIO()
    progress = Progress(total_steps=5, initial_step=0, stream=stream)
    progress.update(1, {REWARD: 0.125, SPEED: 12345.6})
    progress.update(2, {REWARD: 0.25})
    progress.update(3, {REWARD: 0.5, "eval/all/avg_score": 0.9, "eval/environment/catch_rate": 1.0, N_FAILED: 14})
    progress.update(4, {REWARD: 0.75})
    progress.update(5, {REWARD: 1.0})
    progress.close()
    lines = stream.getvalue().splitlines()
    scores = "eval at step 3: avg_score 0.900, catch_rate 1.000 · 12,346 tok/s"
    assert lines == [
        "step 1/5 (20%) · reward 0.125 · 12,346 tok/s · 00:00 elapsed · 00:02 left · 2.00 steps/s",
        f"step 3/5 (60%) · reward 0.500 (14 failed) · {scores} · 00:06 elapsed · 00:04 left · 2.00 s/step",
        f"step 5/5 (100%) · reward 1.000 · {scores} · 00:10 elapsed · 2.00 s/step",
    ]
    assert "\r" not in stream.getvalue()


def test_slow_steps_of_a_resumed_run_get_a_line_each_and_count_from_its_checkpoint() -> None:
    stream = io.StringIO()
    progress = Progress(total_steps=10, initial_step=7, stream=stream, seconds_between_lines=0)
    for step in (8, 9, 10):
        progress.update(step, {REWARD: 1.0})
    first, *later = stream.getvalue().splitlines()
    assert first.startswith("step 8/10 (80%) · reward 1.000 · 00:00 elapsed · 00:00 left · ")
    assert len(later) == 2


def _terminal_output(columns: int) -> str:
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, columns))
    with os.fdopen(follower, "w") as stream:
        progress = Progress(total_steps=4, initial_step=0, stream=stream)
        progress.update(1, {REWARD: 0.5})
        progress.update(2, {REWARD: 0.75, SPEED: 100})
        progress.update(4, {})
        progress.close()
        progress.close()
    output = b""
    with (
        os.fdopen(leader, "rb", buffering=0) as screen,
        contextlib.suppress(OSError),
    ):  # once all writers have closed it
        while chunk := screen.read(65536):
            output += chunk
    return output.decode()


def test_a_terminal_gets_one_live_line() -> None:
    shown = _terminal_output(columns=100)
    assert "\r" in shown
    assert shown.count("\n") == 1
    assert "step 2/4 50% |" in shown
    assert re.search(r" steps/s, reward 0\.750 · 100 tok/s", shown)


@pytest.mark.parametrize("columns", [0, 30])
def test_a_narrow_terminal_still_shows_the_step(columns: int) -> None:
    assert "4/4" in _terminal_output(columns)
