"""Requests and seeds of rollouts."""

from dataclasses import replace

from skyrl_train.generators.base import request_seed, rollout_requests
from skyrl_train.types import DrawnPrompt, PromptRow, TrajectoryID


def test_requests_name_an_environment_and_repeat_each_prompt() -> None:
    rows = [PromptRow("0", [], None, {}), PromptRow("1", [], "catch", {})]
    requests = rollout_requests([DrawnPrompt(7, rows[0], 0), DrawnPrompt(8, rows[1], 1)], 2, "gsm8k")
    assert [request.id.to_string() for request in requests] == ["0_0", "0_1", "1_0", "1_1"]
    assert [request.id.draw for request in requests] == [7, 7, 8, 8]
    assert [request.row.env_class for request in requests] == ["gsm8k", "gsm8k", "catch", "catch"]
    assert rows[0].env_class is None


def test_the_seed_of_a_turn_depends_on_trajectory_id_and_turn() -> None:
    id = TrajectoryID("0", 0, draw=5)
    first = request_seed(1, id, 0)
    others = [
        request_seed(2, id, 0),
        request_seed(1, id, 1),
        request_seed(1, replace(id, draw=6), 0),
        request_seed(1, replace(id, phase="eval"), 0),
        request_seed(1, replace(id, instance_id="1"), 0),
        request_seed(1, replace(id, repetition_id=1), 0),
    ]
    assert len({first, *others}) == 7
    assert request_seed(1, TrajectoryID("0", 0, draw=5), 0) == first
