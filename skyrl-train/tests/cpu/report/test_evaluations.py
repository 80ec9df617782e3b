import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import DataError
from skyrl_train.report.evaluations import pick_examples, read_evaluation
from skyrl_train.tracking import RunFolder


def _write(folder: RunFolder, step: int, rows: list[dict[str, Any]], name: str = "catch.jsonl") -> None:
    (folder.evals(step) / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_scores_are_numbers_or_sums_and_none_if_invalid(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _write(folder, 3, [{"score": 1}, {"score": [0.5, 0, 0.25]}, {"score": None, "error": "boom"}, {"score": []}])
    _write(folder, 3, [{"eval/all/avg_score": 1.0}], name="aggregated_results.jsonl")
    trajectories = read_evaluation(folder, 3)
    assert [trajectory.score for trajectory in trajectories] == [1.0, 0.75, None, 0.0]
    assert trajectories[2].error == "boom"


def test_the_score_of_several_rows_is_the_total_reward(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _write(folder, 3, [{"score": [0.0, 0.5], "total_reward": 2.0}, {"score": None, "total_reward": None}])
    assert [trajectory.score for trajectory in read_evaluation(folder, 3)] == [2.0, None]


def test_a_prompt_may_be_text_or_messages(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _write(folder, 0, [{"input_prompt": [{"role": "user", "content": "Hi"}]}, {"input_prompt": "Hi"}, {}])
    assert [trajectory.prompt for trajectory in read_evaluation(folder, 0)] == ["user: Hi", "Hi", ""]


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


def test_a_small_evaluation_shows_each_trajectory_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _write(folder, 0, [{"input_prompt": "a", "score": 1.0}])
    assert [example.role for example in pick_examples(read_evaluation(folder, 0), [])] == ["best"]
    assert pick_examples([], []) == []
