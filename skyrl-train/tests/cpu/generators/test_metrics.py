import statistics
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from train_kit.trajectories import make_segment, make_trajectory

from skyrl_train.generators.metrics import (
    by_source,
    pass_at_k,
    reward_metrics,
    rollout_metrics,
    training_reward_metrics,
)
from skyrl_train.types import Trajectory, Turn

TURN = Turn(0, 1, 2, 0.0, "stop")


@pytest.fixture
def rollouts() -> list[Trajectory]:
    """Prompt a passes with one of its samples, b never, c only in an invalid trajectory."""
    return [
        make_trajectory("a", [0.5, -0.25, 1.0], turns=(TURN, TURN), env_metrics={"won": 1}),
        make_trajectory("a", [0.0, 0.0], repetition=1, turns=(TURN,), env_metrics={"won": 0}),
        make_trajectory("b", [-1.0, 0.5, 0.0, 0.0], turns=(TURN,), env_metrics={"won": 0}),
        make_trajectory("c", None, response_ids=[1], stop_reason="env_error", env_metrics={"won": 1}, n_attempts=3),
    ]


def test_reward_metrics_by_hand(rollouts: list[Trajectory]) -> None:
    assert reward_metrics(rollouts, 2, None) == {
        "avg_score": pytest.approx((0 + 1.25 - 0.5) / 3),
        "pass_at_2": 0.5,
        "mean_positive_reward": pytest.approx((0 + 1.5 + 0.5) / 3),
    }
    assert set(training_reward_metrics(rollouts, 5, None)) == {
        "reward/avg_raw_reward",
        "reward/avg_pass_at_5",
        "reward/mean_positive_reward",
    }


@pytest.mark.parametrize(("success_reward", "passed"), [(None, 0.5), (1.25, 0.5), (1.3, 0.0), (-0.5, 1.0)])
def test_a_trajectory_passes_with_the_reward_of_a_success(
    success_reward: float | None, passed: float, rollouts: list[Trajectory]
) -> None:
    assert reward_metrics(rollouts, 2, success_reward)["pass_at_2"] == passed
    assert pass_at_k(rollouts, success_reward)["pass_at_2"] == pytest.approx(1.0 if passed == 0.5 else passed)
    assert training_reward_metrics(rollouts, 2, success_reward)["reward/avg_pass_at_2"] == passed


def test_reward_metrics_include_earlier_rows() -> None:
    earlier = make_segment([2.0, -1.0])
    metrics = reward_metrics([make_trajectory("a", [1.0], earlier=(earlier,))], 1, None)
    assert metrics == {"avg_score": 2.0, "pass_at_1": 1.0, "mean_positive_reward": 3.0}


def test_two_draws_of_a_row_are_two_prompts() -> None:
    twice = [make_trajectory("a", [float(draw)], repetition=i, draw=draw) for draw in (0, 1) for i in range(2)]
    assert reward_metrics(twice, 2, None)["pass_at_2"] == 0.5
    assert pass_at_k(twice, None) == {"pass_at_1": 0.5, "pass_at_2": 0.5}


def test_pass_at_k_is_the_mean_over_all_subsets_of_k_samples() -> None:
    passed = {"a": [1, 0, 0, 1, 0], "b": [0, 0, 0], "c": [1, 1], "d": [0, 1, 0, 0]}
    trajectories = [
        make_trajectory(uid, [float(reward)], repetition=i)
        for uid, rewards in passed.items()
        for i, reward in enumerate(rewards)
    ]
    trajectories.append(make_trajectory("b", None, repetition=9, stop_reason="env_error"))
    expected = {}
    for k in (1, 2, 4):
        shares = [
            statistics.fmean(any(chosen) for chosen in combinations(rewards, k))
            for rewards in passed.values()
            if len(rewards) >= k
        ]
        expected[f"pass_at_{k}"] = pytest.approx(statistics.fmean(shares))
    assert pass_at_k(trajectories, None) == expected
    assert pass_at_k([], None) == {}


def test_rollout_metrics_by_hand(rollouts: list[Trajectory]) -> None:
    assert rollout_metrics(rollouts) == {
        "generate/n_invalid": 1,
        "generate/n_invalid/env_error": 1,
        "generate/n_retries": 2,
        "generate/min_num_tokens": 2,
        "generate/max_num_tokens": 4,
        "generate/avg_num_tokens": 3,
        "generate/std_num_tokens": pytest.approx((2 / 3) ** 0.5),
        "generate/truncated_ratio": 0,
        "generate/avg_turns": pytest.approx(4 / 3),
        "generate/avg_tokens_non_zero_rewards": 3.5,
        "generate/avg_tokens_zero_rewards": 2,
        "environment/guess/won": pytest.approx(1 / 3),
        "environment/won": pytest.approx(1 / 3),
    }


def test_without_a_valid_trajectory_there_are_only_counts(rollouts: list[Trajectory]) -> None:
    counts = {"generate/n_invalid": 1, "generate/n_invalid/env_error": 1, "generate/n_retries": 2}
    assert rollout_metrics(rollouts[3:]) == counts
    assert reward_metrics(rollouts[3:], 2, None) == {}
    assert rollout_metrics([]) == {"generate/n_invalid": 0, "generate/n_retries": 0}


def test_lengths_by_reward_are_omitted_for_empty_classes() -> None:
    metrics = rollout_metrics([make_trajectory("a", [-1.0])])
    assert [name for name in metrics if name.endswith("_rewards")] == ["generate/avg_tokens_non_zero_rewards"]


def test_any_data_source_is_the_name_of_a_file(rollouts: list[Trajectory], tmp_path: Path) -> None:
    names = ["a/b", "é" * 400, "é" * 399 + "x", "line\nbreak", "\0", "."]
    groups = by_source([replace(rollouts[0], data_source=name) for name in names])
    assert len(groups) == len(names)
    for name in groups:
        (tmp_path / f"{name}.jsonl").write_text("x")
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.jsonl" for name in groups}
