import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_kit.processes import python

from skyrl_report.metrics_file import read_metrics
from skyrl_train.errors import DataError
from skyrl_train.tracking import MetricsFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def test_numbers_are_written_plainly_and_nan_or_infinity_as_null(path: Path) -> None:
    file = MetricsFile(path)
    file.log({"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0), "d": float("nan"), "e": float("-inf")}, step=1)
    file.close()
    assert path.read_text() == '{"step": 1, "a": 1, "b": 0.5, "c": 2.0, "d": null, "e": null}\n'
    assert read_metrics(path)[0]["d"] is None


def test_truncate_after_keeps_the_restored_step_and_allows_further_logging(path: Path) -> None:
    file = MetricsFile(path)
    for step in (1, 2, 2, 3, 4):
        file.log({"a": step}, step)
    file.truncate_after(2)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 2]
    file.log({"a": 30}, 3)
    file.close()
    assert [row["a"] for row in read_metrics(path)] == [1, 2, 2, 30]
    assert [row["step"] for row in read_metrics(path.with_name("metrics.superseded.jsonl"))] == [3, 4]


def test_a_broken_line_before_the_last_is_an_error_with_its_line_number(path: Path) -> None:
    assert read_metrics(path) == []
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2 "):
        read_metrics(path)


@given(cut=st.integers(min_value=0, max_value=40))
def test_a_truncated_file_loses_at_most_its_last_line(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    whole = '{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n'
    path.write_text(whole[:cut])
    rows = read_metrics(path)
    assert len(rows) == (cut + 1) // 20  # a complete object counts even without its newline
    file = MetricsFile(path)
    file.log({"a": 9}, 9)
    file.close()
    assert read_metrics(path) == [*rows, {"step": 9, "a": 9}]


_WRITES_UNTIL_KILLED = """
import sys
from pathlib import Path
from skyrl_train.tracking import MetricsFile
file = MetricsFile(Path(sys.argv[1]))
for step in range(10**9):
    file.log({"a": step}, step)
    if step == 100:
        print("going", flush=True)
"""


def test_a_killed_writer_leaves_a_readable_file_that_can_be_resumed(path: Path) -> None:
    with subprocess.Popen([python(), "-c", _WRITES_UNTIL_KILLED, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"going\n"
        process.kill()
        assert process.stdout.read() == b"", "the writer has ended"
    steps = [row["step"] for row in read_metrics(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > 100
    file = MetricsFile(path)
    file.truncate_after(50)
    file.close()
    assert [row["step"] for row in read_metrics(path)] == list(range(51))
