import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from examples.livecodebench.lcb_dataset import main
from examples.livecodebench.tasks import TASKS

PUBLIC = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
PRIVATE = [{"input": "5 5\n", "output": "10\n", "testtype": "stdin"}]
SUM = "```python\nprint(sum(map(int, input().split())))\n```"


def pack(value: Any) -> str:
    """Pack hidden tests in the format of LiveCodeBench."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def lcb_row(**change: Any) -> dict[str, Any]:
    """Return a row in the format of LiveCodeBench."""
    return {
        "question_title": "Sum",
        "question_content": "Add two numbers.",
        "platform": "atcoder",
        "question_id": "abc_1",
        "contest_id": "abc",
        "contest_date": "2024-01-01T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(PUBLIC),
        "private_test_cases": pack(json.dumps(PRIVATE)),
        "metadata": "{}",
    } | change


def deepcoder_row(**change: Any) -> dict[str, Any]:
    """Return a row in the format of DeepCoder's part of LiveCodeBench, with a function to write."""
    tests = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional", "metadata": {"func_name": "add"}}]
    starter_code = "class Solution:\n    def add(self, numbers: List[int], n: int) -> List[int]:\n        "
    return {"problem": "Add n to each.", "starter_code": starter_code, "tests": json.dumps(tests)} | change


def test_every_task_of_the_sample_can_be_solved(prepare: Any, play: Any, tmp_path: Path) -> None:
    splits = prepare(main, "--source", "sample")
    schema = pq.read_schema(tmp_path / "data" / "train.parquet")
    assert str(schema.field("reward_spec").type) == "struct<method: string, ground_truth: large_string>"
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 14, "validation": 3}
    solutions = {task.title: task.solution for task in TASKS}
    assert len(solutions) == len(TASKS) == 17
    for row in splits["train"] + splits["validation"]:
        code = solutions[row.env_extras["extra_info"]["title"]]
        assert play(row, f"Here it is:\n```python\n{code}\n```") == 1.0, code
        assert code not in row.prompt[0]["content"]
    assert play(row, code) == 0.0, "a program without its fence"
    assert play(row, "```python\nprint('no')\n```") == 0.0


def test_tests_of_the_sample_have_different_outputs(prepare: Any) -> None:
    """A program with constant output solves no task."""
    for task in TASKS:
        outputs = {json.dumps(expected) for _, expected in task.tests}
        assert len(outputs) > 1, task.title
        assert len(json.loads(task.tests_as_json())) == len(task.tests) >= 3


def test_prompts_differ_for_programs_and_functions(prepare: Any) -> None:
    splits = prepare(main, "--source", "sample")
    rows = {row.env_extras["extra_info"]["title"]: row for rows in splits.values() for row in rows}
    program, function = (rows[title].prompt[0]["content"] for title in ("sum of two", "primes"))
    assert "reads its input from standard input" in program
    assert program.endswith("\n\nRead two integers, each on a line of its own. Print their sum.")
    assert function.endswith("```python\ndef primes_below(limit: int) -> list[int]:\n```")
    assert [rows[title].env_class for title in ("sum of two", "primes")] == ["lcb", "lcb"]


def test_rows_of_livecodebench_are_converted(prepare: Any, play: Any, source: Any) -> None:
    row = prepare(main, "--source", source([lcb_row()], [lcb_row()]))["train"][0]
    spec = row.env_extras.pop("reward_spec")
    assert row.prompt[0]["content"].endswith("between ```python and ```.\n\nAdd two numbers.")
    assert spec["method"] == "rule"
    assert json.loads(spec["ground_truth"]) == PUBLIC + PRIVATE
    assert row.env_extras == {
        "data_source": "livecodebench",
        "extra_info": {"split": "train", "index": 0, "title": "Sum"},
    }
    row.env_extras["reward_spec"] = spec
    assert (play(row, SUM), play(row, "```python\nprint(3)\n```")) == (1.0, 0.0)


FUNCTION_TESTS = json.dumps([{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}])
FUNCTION_ROW = lcb_row(
    public_test_cases=FUNCTION_TESTS,
    private_test_cases=FUNCTION_TESTS,
    metadata=json.dumps({"func_name": "add"}),
    starter_code="def add(a, n):",
)


@pytest.mark.parametrize(
    ("raw", "end", "right", "wrong"),
    [
        (FUNCTION_ROW, "def add(a, n):", "def add(a, n): return [x + n for x in a]", "def add(a, n): return a"),
        (
            deepcoder_row(),
            "-> List[int]:",
            "class Solution:\n    def add(self, numbers, n): return [x + n for x in numbers]",
            "class Solution: pass",
        ),
    ],
    ids=["livecodebench", "deepcoder"],
)
def test_rows_with_a_function_are_converted(
    raw: Any, end: str, right: str, wrong: str, prepare: Any, play: Any, source: Any
) -> None:
    row = prepare(main, "--source", source([raw], [raw]))["train"][0]
    assert "must have the name and the parameters of the code below" in row.prompt[0]["content"]
    assert row.prompt[0]["content"].endswith(f"{end}\n```")
    assert play(row, f"```python\n{right}\n```") == 1.0
    assert play(row, f"```python\n{wrong}\n```") == 0.0


class MaliciousPickle:
    """An object whose pickle runs a command when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_unpacking_hidden_tests_runs_no_code(tmp_path: Path, source: Any, refuse: Any) -> None:
    created_folder = tmp_path / "evil"
    raw = lcb_row(private_test_cases=pack(MaliciousPickle(created_folder)))
    assert "mkdir is not text" in refuse(main, "--source", source([raw], [raw]))
    assert not created_folder.exists()
    pickle.loads(pickle.dumps(MaliciousPickle(created_folder)))
    assert created_folder.exists()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (deepcoder_row(problem=None), "it has no 'problem'"),
        (deepcoder_row(tests=None), "it has no 'public_test_cases'"),
        (deepcoder_row(tests="["), "tests='[' is not JSON"),
        (deepcoder_row(tests='{"inputs": []}'), "is not a list of tests"),
        (deepcoder_row(tests="[]"), "the task has no tests"),
        (deepcoder_row(tests='[{"input": "1", "output": "1", "testtype": "functional"}]'), "func_name"),
        (lcb_row(private_test_cases="!"), "private_test_cases='!' cannot be unpacked"),
        (lcb_row(private_test_cases="AAAA"), "private_test_cases='AAAA' cannot be unpacked"),
        (lcb_row(private_test_cases=pack(3)), "private_test_cases='3' is not a list of tests"),
        (lcb_row(private_test_cases=pack("[")), "private_test_cases='[' is not JSON"),
        (lcb_row(private_test_cases=base64.b64encode(zlib.compress(b"X")).decode()), "cannot be unpacked"),
    ],
)
def test_invalid_tests_are_refused(raw: dict[str, Any], message: str, source: Any, refuse: Any) -> None:
    error = refuse(main, "--source", source([raw], [raw]))
    assert "row 0 of the train split" in error
    assert message in error
