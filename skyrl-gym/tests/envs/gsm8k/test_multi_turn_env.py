from typing import Any

import pytest
from gym_kit.messages import user

from skyrl_gym.envs.gsm8k.multi_turn_env import ANSWER_NOW, TRY_AGAIN, GSM8kMultiTurnEnv
from skyrl_gym.metrics import default_aggregate_metrics


def new(env_config: dict[str, Any] | None = None, **extras: Any) -> GSM8kMultiTurnEnv:
    return GSM8kMultiTurnEnv(env_config=env_config, extras={"reward_spec": {"ground_truth": "42"}} | extras)


def test_an_episode_ends_with_the_right_answer_or_the_last_turn() -> None:
    env = new()
    steps = [env.step("#### 41") for _ in range(5)]
    assert [step["reward"] for step in steps] == [0.0] * 4 + [0.2]
    assert [step["done"] for step in steps] == [False] * 4 + [True]
    assert [step["observations"] for step in steps] == [user(TRY_AGAIN)] * 3 + [user(ANSWER_NOW), []]
    assert env.get_metrics() == {"steps": 5}
    with pytest.raises(RuntimeError, match="ended after turn 5"):
        env.step("#### 42")
    env = new(max_turns=3)
    first, second = env.step("#### 41"), env.step("#### 42")
    assert (first["reward"], first["done"]) == (0.0, False)
    assert (second["reward"], second["done"], second["observations"]) == (1.0, True, [])
    assert second["metadata"] == {"parsed_answer": "42", "undecided": None}
    with pytest.raises(RuntimeError, match="ended after turn 2"):
        env.step("#### 42")


def test_other_graders() -> None:
    assert new({"grader": "flexible"}).step("So 42.")["reward"] == 1.0
    env = new({"grader": "math_verify"}, max_turns=2)
    assert env.step("I do not know.")["reward"] == 0.0
    assert env.step(r"\boxed{43}")["reward"] == 0.2
    assert env.get_metrics() == {"steps": 2, "undecided": 0}
    env = new({"grader": "math_verify"})
    for n_undecided in (1, 2):
        assert env.step("#### " + "1" * 10_000)["metadata"]["undecided"] == "length"
        assert env.get_metrics() == {"steps": n_undecided, "undecided": n_undecided}


def test_metrics_of_a_batch() -> None:
    aggregate = GSM8kMultiTurnEnv.aggregate_metrics
    assert aggregate([{"steps": 1}, {"steps": 4}]) == {"avg_steps": 2.5}
    assert aggregate([{"steps": 1, "undecided": 1}, {"steps": 1, "undecided": 0}]) == {"avg_steps": 1, "undecided": 0.5}
    assert aggregate([]) == default_aggregate_metrics([]) == {}
