import doctest
import io
import re
from pathlib import Path

import pytest
from report_kit.example import write_example, write_session
from report_kit.runs import write_metrics
from rich.console import Console

from skyrl_report.run_folder import RunFolder
from skyrl_report.watch import terminal
from skyrl_report.watch.terminal import watch_terminal


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return write_example(tmp_path / "catch/shaped")


def _end(folder: RunFolder) -> None:
    write_metrics(folder.metrics, [{"reward/avg_raw_reward": 1.0, "trainer/tokens_per_second": 6000.0}] * 21)
    write_session(folder, ended_at=1.0)


def test_without_a_terminal_there_is_a_line_per_step(folder: RunFolder) -> None:
    output, naps = io.StringIO(), []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            _end(folder)

    watch_terminal(folder, None, Console(file=output, width=30), sleep)
    first, last = output.getvalue().splitlines()
    assert first.startswith("step 8 of 20 · running · ")
    assert first.endswith("average raw reward 0.8 · eval average score 0.5 · tokens/s 5,000 · memory GB 1.5")
    assert last == "step 20 of 20 · finished · average raw reward 1 · tokens/s 6,000"


def test_a_terminal_shows_the_run_until_it_ends(folder: RunFolder) -> None:
    output = io.StringIO()
    console = Console(file=output, width=80, height=40, force_terminal=True, color_system=None)
    watch_terminal(folder, None, console, lambda _: _end(folder))
    text = output.getvalue()
    for expected in (
        "catch / shaped",
        "step 8 of 20 · running",
        "▁",
        "rollouts",
        "! 2026-01-02 03:04:06 The disk is slow",
    ):
        assert expected in text
    assert re.search(r"^average raw reward +0\.8 +▁", text, re.MULTILINE)
    assert "last sample · catch · score -1" in text
    assert "Where is <the> ball?" in text, "markup is not read from text"
    assert "step 20 of 20 · finished" in text


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(terminal).failed == 0
