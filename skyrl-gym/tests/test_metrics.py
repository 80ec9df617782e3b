from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym import error
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.registration import register
from skyrl_gym.metrics import aggregate_by_environment, aggregate_for_environment, default_aggregate_metrics


class ScoreEnv(BaseTextEnv):
    """Keeps the default rule."""


class BestEnv(BaseTextEnv):
    """Defines its own rule, which relies on its key."""

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"best_score": max(episode["score"] for episode in metrics)}


@pytest.fixture(autouse=True)
def registered() -> None:
    register("score", ScoreEnv)
    register("best", BestEnv)


def test_the_default_is_the_mean_of_each_number() -> None:
    episodes = [{"steps": 2, "won": True, "score": 0.5}, {"steps": 4, "won": False, "score": 1.5}]
    assert default_aggregate_metrics(episodes) == {"steps": 3.0, "won": 0.5, "score": 1.0}


def test_a_key_is_averaged_over_the_episodes_that_have_it() -> None:
    assert default_aggregate_metrics([{"score": 1.0}, {}, {"score": 0.0, "late": 7}]) == {"score": 0.5, "late": 7.0}


def test_other_types_are_dropped() -> None:
    assert default_aggregate_metrics([{"name": "catch", "path": [1, 2], "nothing": None, "z": 1j}]) == {}


def test_no_episodes_give_no_metrics() -> None:
    assert default_aggregate_metrics([]) == {}


def test_numbers_from_numpy_count() -> None:
    numpy = pytest.importorskip("numpy")
    episode = {"half": numpy.float32(0.5), "three": numpy.int64(3), "yes": numpy.bool_(True), "row": numpy.ones(2)}
    assert default_aggregate_metrics([episode]) == {"half": 0.5, "three": 3.0, "yes": 1.0}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_mean_lies_between_minimum_and_maximum(scores: list[float]) -> None:
    mean = default_aggregate_metrics([{"score": score} for score in scores])["score"]
    assert math.isfinite(mean)
    assert min(scores) - 1e-6 <= mean <= max(scores) + 1e-6


def test_environment_may_define_its_own_rule() -> None:
    episodes = [{"score": 1}, {"score": 3}]
    assert aggregate_for_environment("best", episodes) == {"best_score": 3}
    assert aggregate_for_environment("score", episodes) == {"score": 2.0}


def test_the_rule_is_found_through_an_imported_entry_point() -> None:
    register("imported", f"{__name__}:BestEnv")
    assert aggregate_for_environment("imported", [{"score": 3}]) == {"best_score": 3}


def test_a_function_as_entry_point_means_the_default_rule() -> None:
    register("factory", lambda env_config, extras: BestEnv())
    assert aggregate_for_environment("factory", [{"score": 1}, {"score": 3}]) == {"score": 2.0}


def test_episodes_without_metrics_are_dropped_before_aggregation() -> None:
    assert aggregate_for_environment("best", [{}, {"score": 2}]) == {"best_score": 2}
    assert aggregate_for_environment("best", [{}, {}]) == {}


@pytest.mark.parametrize("entry_point", [BestEnv, "only_in_the_environments_own_python:BestEnv"])
def test_failing_rule_is_replaced_by_the_default_with_one_warning(
    caplog: pytest.LogCaptureFixture, entry_point: Any
) -> None:
    """The rule may miss a key, or the environment may run in another interpreter."""
    name = f"failing {entry_point}"
    register(name, entry_point)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert aggregate_by_environment([name], [{"steps": 2}])[f"environment/{name}/steps"] == 2.0
    (record,) = caplog.records
    assert name in record.message
    assert "KeyError" in record.message or "ModuleNotFoundError" in record.message


def test_rule_that_returns_none_is_replaced_by_the_default() -> None:
    class SilentEnv(BaseTextEnv):
        @staticmethod
        def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            return None

    register("silent", SilentEnv)
    assert aggregate_for_environment("silent", [{"steps": 2}]) == {"steps": 2.0}


def test_an_unregistered_environment_is_an_error_even_without_episodes() -> None:
    with pytest.raises(error.UnregisteredEnv, match="No registered env with id: 'chess'"):
        aggregate_for_environment("chess", [])


def test_a_batch_of_one_environment_is_logged_under_both_names() -> None:
    assert aggregate_by_environment(["score", "score"], [{"score": 0}, {"score": 1}]) == {
        "environment/score/score": 0.5,
        "environment/score": 0.5,
    }


def test_environments_that_share_a_key_do_not_overwrite_each_other() -> None:
    register("other", ScoreEnv)
    metrics = aggregate_by_environment(["score", "other", "score"], [{"score": 0}, {"score": 10}, {"score": 1}])
    assert metrics == {"environment/score/score": 0.5, "environment/other/score": 10.0}


def test_an_empty_batch_logs_nothing() -> None:
    assert aggregate_by_environment([], []) == {}


def test_a_batch_with_a_missing_episode_is_refused() -> None:
    with pytest.raises(ValueError, match="got 2 env_classes for the metrics of 1 episodes"):
        aggregate_by_environment(["score", "score"], [{"score": 1}])
