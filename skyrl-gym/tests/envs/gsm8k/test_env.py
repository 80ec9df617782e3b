from __future__ import annotations

from typing import Any

import pytest

from skyrl_gym.envs.gsm8k.env import GSM8kEnv

PROMPT = [{"role": "user", "content": "What is 6 * 7?"}]


def new(**env_config: Any) -> GSM8kEnv:
    return GSM8kEnv(env_config=env_config, extras={"reward_spec": {"method": "rule", "ground_truth": "42"}})


@pytest.mark.parametrize(
    ("reply", "reward", "parsed"),
    [("6 * 7 = 42\n#### 42", 1.0, "42"), ("#### 41", 0.0, "41"), ("42", 0.0, None), ("", 0.0, None)],
)
def test_episode_has_one_reply(reply: str, reward: float, parsed: str | None) -> None:
    with new() as env:
        assert env.init(PROMPT) == (PROMPT, {})
        assert env.step(reply) == {
            "observations": [],
            "reward": reward,
            "done": True,
            "metadata": {"parsed_answer": parsed, "undecided": None},
        }
        assert env.turns == env.max_turns == 1
        assert env.get_metrics() == {}


def test_env_config_chooses_the_grader() -> None:
    assert new(grader="strict").step("It is 42.")["reward"] == 0.0
    assert new(grader="flexible").step("It is 42.")["reward"] == 1.0
    env = new(grader="math_verify")
    assert env.step(r"\boxed{\frac{84}{2}}")["reward"] == 1.0
    assert env.get_metrics() == {"undecided": 0}


def test_undecided_answer_counts_as_wrong() -> None:
    env = new(grader="math_verify")
    step = env.step(r"\boxed{" + "1" * 10_000 + "}")
    assert (step["reward"], step["done"], step["metadata"]["undecided"]) == (0.0, True, "length")
    assert env.get_metrics() == {"undecided": 1}
