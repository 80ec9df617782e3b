"""Requests and seeds of rollouts."""

from dataclasses import replace

from skyrl_train.generators.base import RolloutRequest, request_seed, rollout_requests
from skyrl_train.generators.rollout import Rollout
from skyrl_train.types import DrawnPrompt, PromptRow, TrajectoryID


def test_requests_name_an_environment_and_repeat_each_prompt() -> None:
    rows = [PromptRow("0", [], None, {}), PromptRow("1", [], "catch", {})]
    requests = rollout_requests([DrawnPrompt(7, rows[0], 0), DrawnPrompt(8, rows[1], 1)], 2, "gsm8k")
    assert [request.id.to_string() for request in requests] == ["0_0", "0_1", "1_0", "1_1"]
    assert [request.id.draw for request in requests] == [7, 7, 8, 8]
    assert [request.row.env_class for request in requests] == ["gsm8k", "gsm8k", "catch", "catch"]
    assert rows[0].env_class is None


def test_seeds_and_session_ids_depend_on_the_whole_trajectory_id() -> None:
    id = TrajectoryID("17", 3, draw=5)
    others = [
        replace(id, draw=6),
        replace(id, phase="eval"),
        replace(id, instance_id="1"),
        replace(id, repetition_id=1),
    ]
    seeds = {request_seed(run, id, turn) for run, turn in ((1, 0), (2, 0), (1, 1))}
    assert len(seeds | {request_seed(1, other, 0) for other in others}) == 7
    assert request_seed(1, TrajectoryID("17", 3, draw=5), 0) in seeds
    row = PromptRow("17", [], None, {})
    attempts = [Rollout(RolloutRequest(i, row), 1, attempt) for i in (id, *others) for attempt in range(2)]
    assert attempts[0].session_id == "train-5-17-3-0"
    assert len({rollout.session_id for rollout in attempts}) == 10
