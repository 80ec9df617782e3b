from __future__ import annotations

import json
from typing import Any

import pytest

from skyrl_agent.tasks.general_react import GeneralReactTask, find_family
from skyrl_train.errors import DataError

TESTS = json.dumps([{"input": "2 3", "output": "5", "testtype": "stdin"}])
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)"
STATED = (
    *("The result is 42.", "Final result: 42", "So there are 42 ways.", "I add.\nThe sum equals 42", "Result = 42"),
    *(
        "It takes 42 days.",
        "**The result is 42.**",
        "The sum of 6 and 36 is 42.",
        "We get x = 42",
        "The value is $42$.",
    ),
)
NOT_STATED = (
    *("The result is 41.", "There are 41 or 42 ways.", "The result is not 42.", "There are 42 million ways."),
    *("One root is 41 and the other is 42.", "42 of 100", "The result is 42%.", "The result is -42", "at least 42"),
    *("So there are 42x ways.", "There are 42.5 ways.", "It is 42 or more.", "I am 42% sure.", "The result is 4 2"),
)


def grade(result: Any, truth: Any, data_source: str) -> float:
    row = {"prompt": [{"role": "user", "content": "How?"}], "reward_spec": {"ground_truth": truth}}
    GeneralReactTask.check_instance(row, data_source)
    return float(GeneralReactTask.evaluate_result(result, row, data_source))


@pytest.mark.parametrize(
    ("result", "truth", "data_source", "reward"),
    [
        ("the Paris", {"target": ["Paris"]}, "hotpotqa", 1.0),
        ("Paris or Rome", {"target": ["Paris"]}, "searchR1_nq", 0.0),
        (None, {"target": ["Paris"]}, "triviaqa", 0.0),
        ("  ", "Paris", "2wikimultihop", 0.0),
        ("I add.\n42", "42", "math_dapo", 1.0),
        ("Answer: 42", "42", "math_dapo", 1.0),
        ("The answer is 42.", "42", "math_dapo", 1.0),
        (r"\boxed{42}", "42", "aime24", 1.0),
        ("41", "42", "aime24", -1.0),
        ("41 or 42", "42", "aime24", -1.0),
        ("Answer: 41 or 42", "42", "aime24", -1.0),
        *((answer, "42", "math_dapo", 1.0) for answer in STATED),
        *((answer, "42", "math_dapo", -1.0) for answer in NOT_STATED),
        ("The balance is −7.", "-7", "math_dapo", 1.0),
        ("The balance is -7.", "7", "math_dapo", -1.0),
        (r"The probability is $\dfrac{1}{2}$.", r"\frac{1}{2}", "math_dapo", 1.0),
        (r"So the solution set: $(2, \infty)$", r"(2,\infty)", "math_dapo", 1.0),
        (None, "42", "math", -1.0),
        (PROGRAM, TESTS, "codegen-taco", 1.0),
        (f"Here:\n```python\n{PROGRAM}\n```", TESTS, "livecodebench", 1.0),
        ("print(6)", TESTS, "lcb", 0.0),
        (None, TESTS, "lcb", 0.0),
    ],
)
def test_the_data_source_chooses_the_grader(result: Any, truth: Any, data_source: str, reward: float) -> None:
    assert grade(result, truth, data_source) == reward


@pytest.mark.parametrize("key", ["ground_truth", "answer", "Answer", "target"])
def test_ground_truths_of_other_layouts_are_found(key: str) -> None:
    assert GeneralReactTask.evaluate_result("Paris", {"question": "?", key: "Paris"}, "nq") == 1.0
    assert GeneralReactTask.evaluate_result("x", {"reward_model": {"ground_truth": "x"}, key: "Paris"}, "nq") == 1.0


@pytest.mark.parametrize(
    ("instance", "data_source", "message"),
    [
        ({"answer": "x"}, "default", "no grader is known for data_source='default'; rename it"),
        ({"prompt": []}, "nq", "the instance has no ground truth"),
        ("text", "nq", "the instance is a str"),
    ],
)
def test_rows_that_cannot_be_graded_are_refused(instance: Any, data_source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        GeneralReactTask.check_instance(instance, data_source)


def test_a_data_source_that_only_begins_like_a_known_one_is_unknown() -> None:
    known = ("nq", "nq_open", "searchR1_nq", "2wikimultihopqa", "math_dapo", "aime24", "openai/math-500", "codegen-x")
    assert all(find_family(name) for name in known)
    assert not any(find_family(name) for name in ("nqueens", "rulers_of_france", "mathematicians", "boxes"))
