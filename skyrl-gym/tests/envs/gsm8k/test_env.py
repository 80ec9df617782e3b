from __future__ import annotations

import sys
from typing import Any

import pytest

from skyrl_gym.envs.gsm8k.env import GSM8kEnv

PROMPT = [{"role": "user", "content": "What is 6 * 7?"}]


def new(truth: object = "42", **env_config: Any) -> GSM8kEnv:
    return GSM8kEnv(env_config=env_config, extras={"reward_spec": {"method": "rule", "ground_truth": truth}})


@pytest.mark.parametrize(
    ("reply", "reward", "parsed"),
    [("6 * 7 = 42\n#### 42", 1.0, "42"), ("#### 41", 0.0, "41"), ("42", 0.0, None), ("", 0.0, None)],
)
def test_one_reply_is_an_episode(reply: str, reward: float, parsed: str | None) -> None:
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


def test_the_number_may_be_a_number() -> None:
    assert new(42).step("#### 42")["reward"] == 1.0


def test_the_grader_is_chosen_by_the_configuration() -> None:
    assert new(grader="strict").step("It is 42.")["reward"] == 0.0
    assert new(grader="flexible").step("It is 42.")["reward"] == 1.0
    env = new(grader="math_verify")
    assert env.step(r"\boxed{\frac{84}{2}}")["reward"] == 1.0
    assert env.get_metrics() == {"undecided": 0}


def test_an_answer_that_cannot_be_decided_is_wrong_and_says_so() -> None:
    env = new(grader="math_verify")
    step = env.step(r"\boxed{" + "1" * 10_000 + "}")
    assert (step["reward"], step["done"], step["metadata"]["undecided"]) == (0.0, True, "length")
    assert env.get_metrics() == {"undecided": 1}


def test_what_is_wrong_with_a_configuration_is_said_before_the_first_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"gsm8k\.grader=lenient is unknown; use one of strict, flexible, math_verify"):
        new(grader="lenient")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\./skyrl-gym\[maths\]'"):
        new(grader="math_verify")


def test_a_row_needs_a_ground_truth() -> None:
    with pytest.raises(AssertionError, match="reward_spec field is required"):
        GSM8kEnv(env_config=None, extras={})
    with pytest.raises(AssertionError, match="ground_truth is required in reward_spec field"):
        GSM8kEnv(env_config={}, extras={"reward_spec": {"method": "rule"}})
