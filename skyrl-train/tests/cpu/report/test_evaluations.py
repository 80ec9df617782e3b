import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import DataError
from skyrl_train.report.evaluations import pick_examples, read_evaluation
from skyrl_train.tracking import RunFolder


def _write(folder: RunFolder, step: int, rows: list[dict[str, Any]], name: str = "catch.jsonl") -> None:
    (folder.evals(step) / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_of_this_project_and_of_skyrl_are_read(tmp_path: Path) -> None:
    """A score is a number or a list, `total_reward` counts all segments, and a prompt is text or messages."""
    folder = RunFolder(tmp_path)
    rows = [
        {"score": 1, "input_prompt": [{"role": "user", "content": "Hi"}]},
        {"score": [0.5, 0, 0.25], "input_prompt": "Hi"},
        {"score": None, "error": "boom"},
        {"score": []},
        {"score": [0.0, 0.5], "total_reward": 2.0},
        {"score": None, "total_reward": None},
    ]
    _write(folder, 3, rows)
    _write(folder, 3, [{"eval/all/avg_score": 1.0}], name="aggregated_results.jsonl")
    trajectories = read_evaluation(folder, 3)
    assert [trajectory.score for trajectory in trajectories] == [1.0, 0.75, None, 0.0, 2.0, None]
    assert [trajectory.prompt for trajectory in trajectories] == ["user: Hi", "Hi", "", "", "", ""]
    assert trajectories[2].error == "boom"


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (folder.evals(0) / "a.jsonl").write_text('{"score": 1}\n\n{"score"\n')
    with pytest.raises(DataError, match=r"a\.jsonl:3 is not JSON"):
        read_evaluation(folder, 0)
    (folder.evals(1) / "a.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match=r"a\.jsonl:1 is list"):
        read_evaluation(folder, 1)


def test_best_median_and_worst_are_shown_with_their_earlier_response(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _write(folder, 0, [{"input_prompt": f"p{i}", "score": 0.0, "output_response": "old"} for i in (1, 4)])
    _write(folder, 9, [{"input_prompt": f"p{i}", "score": float(i)} for i in range(5)] + [{"score": None}])
    examples = pick_examples(read_evaluation(folder, 9), read_evaluation(folder, 0))
    assert [(example.role, example.trajectory.prompt) for example in examples] == [
        ("best", "p4"),
        ("median", "p2"),
        ("worst", "p0"),
    ]
    assert [example.before.response if example.before else None for example in examples] == ["old", None, None]
    one = read_evaluation(folder, 9)[:1]
    assert [example.role for example in pick_examples(one, [])] == ["best"], "each trajectory is shown once"
    assert pick_examples([], []) == []
