from pathlib import Path

import pytest
from veritas_kit.datasets import generate

from data_processing import generate_dataset
from data_processing.jobs import read_records


def test_generation_resumes_after_a_kill(generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = generated.read_text()
    generated.write_text(text[: len(text) - 40])  # the last line is cut off
    assert generate(generated, 8) == 0
    assert "1 tasks written, 7 existed" in capsys.readouterr().out
    assert sorted(generated.read_text().split("\n")) == sorted(text.split("\n"))
    assert generate(generated, 10) == 0
    assert generate(tmp_path / "other.jsonl", 10, "--concurrency", "1") == 0
    assert sorted(generated.read_text().split("\n")) == sorted((tmp_path / "other.jsonl").read_text().split("\n"))


def test_splits_and_options_are_other_tasks(generated: Path) -> None:
    assert generate(generated, 8, "--split", "validation") == 0
    assert generate(generated, 8, "--task-types", "operation") == 0
    records = read_records(generated)
    assert len(records) == len({record["key"] for record in records}) == 24
    ids = [{r["task_id"] for r in records if r["extra_info"]["split"] == split} for split in ("train", "validation")]
    assert not ids[0] & ids[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env", "lgc-v3"], "env='lgc-v3' is not a task family"),
        (["--env", "trace", "--adapter-config", '{"a": 1}'], "no option 'a'"),
        (["--env", "lgc-v2", "--task-types", "chess"], "task_types='chess'"),
        (["--env", "swe-synth", "--adapter-config", '{"task_ids": [0]}'], "go beyond the 1 train"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_dataset.main(["--num-samples", "2", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1
