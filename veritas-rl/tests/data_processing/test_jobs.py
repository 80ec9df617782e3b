from pathlib import Path
from typing import Any

import pytest

from data_processing.jobs import ToolError, read_records, work


def test_a_line_that_is_cut_inside_a_character_is_removed(tmp_path: Path) -> None:
    output, records = tmp_path / "out.jsonl", [{"key": key, "text": "é"} for key in range(3)]
    assert work(records, dict, output, n_total=3).n_written == 3
    content = output.read_bytes()
    output.write_bytes(content[: content.rindex("é".encode()) + 1])
    summary = work(records, dict, output, n_total=3)
    assert (summary.n_written, summary.n_skipped) == (1, 2)
    assert sorted(read_records(output), key=lambda record: record["key"]) == records


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"

    def write_again(record: dict[str, Any]) -> dict[str, Any]:
        with pytest.raises(ToolError, match="another process writes"):
            work([{"key": 2}], dict, output, n_total=1)
        return record

    assert work([{"key": 1}], write_again, output, n_total=1).n_written == 1
    assert read_records(output) == [{"key": 1}]
