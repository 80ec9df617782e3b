import errno
import json
import logging
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from skyrl_report.metrics_file import read_metrics
from skyrl_train.tracking import Tracking, log_to_file, writer
from skyrl_train.tracking.writer import BackgroundWriter


def n_threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_calls_are_made_in_order_and_their_errors_raised_by_the_next() -> None:
    made: list[int] = []
    background = BackgroundWriter("test")

    def fail() -> None:
        raise OSError(errno.ENOSPC, "full")

    for i in range(100):
        background.submit(lambda i=i: made.append(i))
    background.submit(fail)
    background.flush()
    assert made == list(range(100))
    with pytest.raises(OSError, match="full"):
        background.submit(lambda: made.append(100))
    background.submit(lambda: made.append(101))
    background.flush()
    assert made[-2:] == [100, 101], "the call that reports an error is made"
    background.submit(fail)
    with pytest.raises(OSError, match="full"):
        background.close()
    assert n_threads("test") == 0


def test_a_stalled_disk_delays_no_caller_until_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING", 10)
    monkeypatch.setattr(writer, "TIMEOUT_S", 0.05)
    background = BackgroundWriter("test")
    stalled, answers, made = threading.Event(), threading.Event(), []

    def stall() -> None:
        stalled.set()
        assert answers.wait(60)

    background.submit(stall)
    assert stalled.wait(60)
    for i in range(10):
        background.submit(lambda i=i: made.append(i))
    with pytest.raises(TimeoutError, match="10 writes wait for a disk that does not respond"):
        background.submit(lambda: made.append(10))
    for wait in (background.flush, background.close):
        with pytest.raises(TimeoutError, match="does not respond for"):
            wait()
    answers.set()
    monkeypatch.setattr(writer, "TIMEOUT_S", 60)
    background.close()
    assert made == list(range(10))


def test_metrics_and_messages_do_not_wait_for_a_stalled_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, write = threading.Event(), json.dumps

    def stall(*arguments: object, **options: object) -> str:
        assert answers.wait(60)
        return write(*arguments, **options)

    logger = logging.getLogger("skyrl_train.test")
    with log_to_file(tmp_path / "train.log"), Tracking("catch", "shaped", [], {}, tmp_path) as tracking:
        monkeypatch.setattr("skyrl_train.tracking.jsonl.json.dumps", stall)
        metrics = {"reward": 0.0}
        for step in range(100):
            metrics["reward"] = float(step)
            tracking.log(metrics, step)
            logger.info("step %d", step)
        assert read_metrics(tmp_path / "metrics.jsonl") == []
        answers.set()
        tracking.flush()
        assert [row["reward"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(100))
    assert (tmp_path / "train.log").read_text().count("INFO skyrl_train.test: step") == 100
    assert n_threads("metrics") == n_threads("train.log") == 0


def test_a_message_that_cannot_be_formatted_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("skyrl_train.test")
    logger.propagate = False  # pytest's own handler raises
    with log_to_file(tmp_path / "train.log"):
        logger.addHandler(logging.getLogger("skyrl_train").handlers[-1])
        logger.info("%(missing)s", {"name": 1})
        logger.info("the next message")
        logger.handlers.clear()
    logger.propagate = True
    assert "KeyError" in capsys.readouterr().err
    assert "the next message" in (tmp_path / "train.log").read_text()


def test_the_cost_of_a_step_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3,000 steps: the bytes that a step reads and writes, and the memory."""
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    metrics = {f"group_{i % 2}/metric_{i}": i / 3 for i in range(6)}

    def transferred() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))

    with log_to_file(tmp_path / "train.log"), Tracking("a", "b", ["tensorboard"], {}, tmp_path) as tracking:
        costs = []
        for step in range(10_000, 13_000):  # numbers of the same length
            if step % 500 == 0:
                tracking.flush()
                costs.append(transferred())
            tracking.log(metrics, step)
            logging.getLogger("skyrl_train").info("step %d", step)
        tracking.flush()
    per_window = [after - before for before, after in pairwise(costs)]
    assert max(per_window) < 1.1 * min(per_window)
