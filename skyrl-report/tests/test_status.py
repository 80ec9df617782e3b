import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_kit.example import write_example, write_session

from skyrl_report.metrics_file import read_metrics
from skyrl_report.run_folder import RunFolder
from skyrl_report.status import RunStatus, read_status


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return write_example(tmp_path / "catch/shaped")


def _read(folder: RunFolder, silence_s: float = 0.0) -> RunStatus:
    return read_status(folder, read_metrics(folder.metrics), now=folder.metrics.stat().st_mtime + silence_s)


def test_a_run_in_progress(folder: RunFolder) -> None:
    status = _read(folder, silence_s=1.0)
    assert status.step_s == 2.5, "eight steps of 2 s and an evaluation of 4 s"
    assert status.progress == "step 8 of 20 · running · 29 s left"
    assert [curve.name for curve in status.curves] == ["reward/avg_raw_reward", "eval/all/avg_score"]
    assert {part.name for part in status.times} >= {"rollouts", "evaluation"}
    assert status.warnings == ("2026-01-02 03:04:06 The disk is slow",)
    assert status.sample is not None
    assert status.sample.score == -1.0, "the last line of the newest file"


@pytest.mark.parametrize(
    ("fields", "silence_s", "state"),
    [
        ({}, 61.0, "running, but silent for 1 min 01 s"),
        ({"ended_at": 1.0, "total_steps": 8}, 0.0, "finished"),
        ({"ended_at": 1.0}, 0.0, "stopped at step 8"),
        ({"ended_at": 1.0, "error": "boom"}, 0.0, "failed: boom"),
        ({"host": "elsewhere", "pid": 1}, 0.0, "running"),
        ({"is_of_a_later_version": True}, 0.0, "running"),
    ],
)
def test_states(folder: RunFolder, fields: dict[str, Any], silence_s: float, state: str) -> None:
    write_session(folder, **fields)
    assert _read(folder, silence_s).state == state


def test_a_killed_run(folder: RunFolder) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    write_session(folder, pid=process.pid)
    assert _read(folder).progress == "step 8 of 20 · killed: its process is gone"


def test_problems_and_waits(folder: RunFolder) -> None:
    """Findings of the run are shown once, though it logs them too. Waits of a dead run are not shown."""
    folder.findings.write_text(json.dumps({"step": 5, "rule": "no_signal", "text": "The disk is slow"}))
    oldest = {"who": "prompt 7", "detail": "step", "since": folder.metrics.stat().st_mtime - 75.0, "seconds": 0.0}
    folder.waits.write_text(json.dumps({"waits": [{"stage": "environment", "count": 3, "oldest": oldest}]}))
    waiting = "3 waiting: environment, the longest for 1 min 15 s: prompt 7 (step)"
    assert _read(folder).warnings == (waiting, "step 5: The disk is slow")
    write_session(folder, ended_at=1.0)
    assert _read(folder).warnings == ("step 5: The disk is slow",)
    folder.waits.write_text('{"waits": [{"sta')
    write_session(folder)
    assert _read(folder).warnings == ("step 5: The disk is slow",)


def test_an_empty_folder_and_half_written_files(folder: RunFolder, tmp_path: Path) -> None:
    assert _read_empty(tmp_path / "nothing").progress == "step 0 · state unknown"
    folder.train_log.unlink()
    folder.train_log.symlink_to("/dev/zero")
    newest = folder.trajectories(9)
    newest.write_text('{"output_response": "half')
    os.utime(newest, (2e9, 2e9))
    assert _read(folder).sample is not None, "the last complete trajectory"


def _read_empty(path: Path) -> RunStatus:
    path.mkdir()
    return read_status(RunFolder(path), [])
