import json
from pathlib import Path

import pytest

from data_processing import evaluate_dataset
from data_processing.jobs import read_records


def test_generated_answers_are_verified(generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate_dataset.main(["--input", str(generated)]) == 0
    summary = json.loads((generated.parents[1] / "results/tasks.json").read_text())
    assert (summary["total_samples"], summary["accuracy"], summary["error_count"]) == (8, 1, 0)
    assert len(summary["task_type_accuracy"]) == 8
    records = read_records(generated)
    records[0]["answer"], records[1]["extra_info"]["fingerprint"] = "nonsense", "0"
    other = tmp_path / "mine/tasks.jsonl"
    other.parent.mkdir()
    other.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert evaluate_dataset.main(["--input", str(other), "--verbose"]) == 1
    assert (tmp_path / "mine/results/tasks.json").is_file()
    assert "6 of 8 right, 1 errors" in capsys.readouterr().out
