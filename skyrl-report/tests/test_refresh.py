import time
from pathlib import Path

import pytest
from report_kit.example import write_example

from skyrl_report import refresh
from skyrl_report.refresh import MAX_SHARE, Refresher


def _wait_for(refresher: Refresher) -> None:
    assert refresher._process is not None
    refresher._process.wait(timeout=60)
    refresher.poll()


def test_the_page_is_written_at_most_for_a_hundredth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_example(tmp_path / "run")
    now = [0.0]
    monkeypatch.setattr(refresh.time, "monotonic", lambda: now[0])
    refresher = Refresher(folder, "make catch")
    refresher.poll()
    assert refresher._process is None
    now[0] = 50.0
    refresher.poll()
    _wait_for(refresher)
    text = folder.report.read_text()
    assert "make catch" in text
    assert "step 8 of 20" in text
    cost_s = (refresher._due_at - now[0]) * MAX_SHARE
    assert 0.05 < cost_s < 20, "the processor time of a process"
    refresher.poll()
    assert refresher._process is None, "not yet due"
    now[0] += cost_s / MAX_SHARE
    refresher.poll()
    assert refresher._process is not None
    process = refresher._process
    refresher.close()
    assert process.poll() is not None


def test_a_failure_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_example(tmp_path / "run")
    folder.metrics.write_text("{torn\n{}\n")
    refresher = Refresher(folder, "make catch")
    refresher._due_at = time.monotonic()
    refresher.poll()
    _wait_for(refresher)
    assert "metrics.jsonl:1 is not a JSON object" in caplog.text
    refresher.poll()
    assert refresher._process is None
