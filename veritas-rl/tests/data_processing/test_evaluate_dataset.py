from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data_processing import evaluate_dataset
from data_processing.jobs import read_records


def test_generated_answers_are_verified(generated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate_dataset.main(["--input", str(generated)]) == 0
    summary = json.loads((generated.parents[1] / "results/tasks.json").read_text())
    assert (summary["total_samples"], summary["accuracy"], summary["error_count"]) == (8, 1, 0)
    assert len(summary["task_type_accuracy"]) == 8
    records = read_records(generated)
    records[0]["answer"], records[1]["extra_info"]["fingerprint"] = "nonsense", "0"
    generated.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert evaluate_dataset.main(["--input", str(generated), "--verbose"]) == 1
    assert "6 of 8 right, 1 errors" in capsys.readouterr().out


def test_results_are_beside_an_input_in_any_other_folder(generated: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    copy = shutil.copy(generated, tmp_path / "mine")
    assert evaluate_dataset.main(["--input", str(copy)]) == 0
    assert (tmp_path / "mine/results/tasks.json").is_file()
