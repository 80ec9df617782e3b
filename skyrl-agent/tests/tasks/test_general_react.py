from pathlib import Path
from typing import Any

import pytest
import yaml

from skyrl_agent.tasks.general_react import GeneralReactTask, find_family
from skyrl_train.errors import DataError

GROUPS = yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text(encoding="utf-8"))


def grade(result: Any, truth: Any, data_source: str) -> float:
    row = {"prompt": [{"role": "user", "content": "How?"}], "reward_spec": {"ground_truth": truth}}
    GeneralReactTask.check_instance(row, data_source)
    return float(GeneralReactTask.evaluate_result(result, row, data_source))


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group['source']}-{group['score']}")
def test_the_data_source_chooses_the_grader(group: dict[str, Any]) -> None:
    scores = [(answer, grade(answer, group["truth"], group["source"])) for answer in group["answers"]]
    assert scores == [(answer, group["score"]) for answer in group["answers"]]


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
