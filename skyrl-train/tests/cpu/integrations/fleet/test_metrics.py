"""Metrics of Fleet runs: rewards are compared within a draw of a task, not within the task."""

import pytest
from train_kit.trajectories import make_trajectory

from integrations.fleet.metrics import fleet_metrics
from skyrl_train.types import Trajectory


def drawn(draw: int, *rewards: float | None, uid: str = "7") -> list[Trajectory]:
    """Return the trajectories of a draw of a task; None for an invalid one."""
    return [
        make_trajectory(uid, None if r is None else [r], repetition=i, draw=draw, data_source="github")
        for i, r in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("trajectories", "variance", "signal", "pass_at_2"),
    [
        ([*drawn(0, 1.0, 1.0), *drawn(1, 0.0, 0.0)], 0.0, 0.0, 0.5),
        ([*drawn(0, 1.0, 0.0), *drawn(1, 0.0, 0.0)], 0.125, 0.5, 0.5),
        ([*drawn(0, 1.0, 0.0), *drawn(1, 0.0, 1.0, uid="8")], 0.25, 1.0, 1.0),
        ([*drawn(0, 1.0, None), *drawn(1, 0.0, 0.0)], 0.0, 0.0, 0.5),
    ],
    ids=["drawn twice", "one draw differs", "two tasks", "one is invalid"],
)
def test_rewards_are_compared_within_a_draw(
    trajectories: list[Trajectory], variance: float, signal: float, pass_at_2: float
) -> None:
    metrics = fleet_metrics(trajectories, 2)
    for prefix in ("reward", "reward/github"):
        assert metrics[f"{prefix}/variance_per_prompt"] == variance
        assert metrics[f"{prefix}/signal_ratio"] == signal
    assert metrics["reward/github/pass_at_2"] == pass_at_2
