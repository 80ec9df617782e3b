from pathlib import Path

import pytest
from report_kit.runs import write_rows

from skyrl_report.episodes import read_evaluation
from skyrl_report.errors import DataError
from skyrl_report.evaluations import pick_examples
from skyrl_report.run_folder import RunFolder


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
    write_rows(folder.evals(3) / "catch.jsonl", rows)
    write_rows(folder.evals(3) / "aggregated_results.jsonl", [{"eval/all/avg_score": 1.0}])
    trajectories = read_evaluation(folder, 3)
    assert [trajectory.score for trajectory in trajectories] == [1.0, 0.75, None, 0.0, 2.0, None]
    assert [trajectory.prompt for trajectory in trajectories] == ["user: Hi", "Hi", "", "", "", ""]
    assert trajectories[2].error == "boom"


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.evals(0).mkdir(parents=True)
    (folder.evals(0) / "a.jsonl").write_text('{"score": 1}\n\n{"score"\n')
    with pytest.raises(DataError, match=r"a\.jsonl:3 is not JSON"):
        read_evaluation(folder, 0)
    write_rows(folder.evals(1) / "a.jsonl", [[1]])
    with pytest.raises(DataError, match=r"a\.jsonl:1 is list"):
        read_evaluation(folder, 1)


def test_best_median_and_worst_are_shown_with_their_earlier_response(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_rows(
        folder.evals(0) / "catch.jsonl",
        [{"input_prompt": f"p{i}", "score": 0.0, "output_response": "old"} for i in (1, 4)],
    )
    write_rows(
        folder.evals(9) / "catch.jsonl",
        [{"input_prompt": f"p{i}", "score": float(i)} for i in range(5)] + [{"score": None}],
    )
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
