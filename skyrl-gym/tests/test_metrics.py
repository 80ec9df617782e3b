import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import pytest

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


class SilentEnv(BaseTextEnv):
    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> Any:
        return None


@pytest.fixture(autouse=True)
def registered() -> None:
    register("score", ScoreEnv)
    register("best", BestEnv)
    register("imported", f"{__name__}:BestEnv")
    register("factory", lambda env_config, extras: BestEnv())
    register("silent", SilentEnv)


@pytest.mark.parametrize(
    ("episodes", "means"),
    [
        (
            [{"steps": 2, "won": True, "score": 0.5}, {"steps": 4, "won": False, "score": 1.5}],
            {"steps": 3.0, "won": 0.5, "score": 1.0},
        ),
        ([{"score": 1.0}, {}, {"score": 0.0, "late": 7}], {"score": 0.5, "late": 7.0}),  # of those that have the key
        ([{"name": "catch", "path": [1, 2], "nothing": None, "z": 1j, "row": numpy.ones(2)}], {}),
        (
            [{"half": numpy.float32(0.5), "three": numpy.int64(3), "yes": numpy.bool_(True)}],
            {"half": 0.5, "three": 3, "yes": 1},
        ),
        ([], {}),
    ],
)
def test_the_default_is_the_mean_of_each_number(episodes: Any, means: dict[str, float]) -> None:
    assert default_aggregate_metrics(episodes) == means


@pytest.mark.parametrize(
    ("env_class", "metrics"),
    [
        ("best", {"best_score": 3}),
        ("imported", {"best_score": 3}),
        ("score", {"score": 2.0}),
        ("factory", {"score": 2.0}),
        ("silent", {"score": 2.0}),  # its rule returns None
    ],
)
def test_environment_may_define_its_own_rule(env_class: str, metrics: dict[str, float]) -> None:
    assert aggregate_for_environment(env_class, [{"score": 1}, {}, {"score": 3}]) == metrics
    assert aggregate_for_environment(env_class, [{}, {}]) == {}


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


def test_metrics_are_named_after_their_environment() -> None:
    metrics = aggregate_by_environment(["score", "score"], [{"score": 0}, {"score": 1}])
    assert metrics == {"environment/score/score": 0.5, "environment/score": 0.5}
    metrics = aggregate_by_environment(["score", "factory", "score"], [{"score": 0}, {"score": 10}, {"score": 1}])
    assert metrics == {"environment/score/score": 0.5, "environment/factory/score": 10.0}
    assert aggregate_by_environment([], []) == {}
    with pytest.raises(error.UnregisteredEnv, match="No registered env with id: 'chess'"):
        aggregate_for_environment("chess", [])
    with pytest.raises(ValueError, match="got 2 env_classes for the metrics of 1 episodes"):
        aggregate_by_environment(["score", "score"], [{"score": 1}])
