import re
from typing import Any

import pytest
from gym_kit.messages import message_text
from gym_kit.texts import linear_time, long_text
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym.envs.multiply.env import MultiplyEnv


def new(truth: object = "84", **extras: Any) -> MultiplyEnv:
    return MultiplyEnv(env_config={}, extras={"reward_spec": {"method": "rule", "ground_truth": truth}} | extras)


@pytest.mark.parametrize(
    ("reply", "reward", "parsed"),
    [
        (r"\boxed{ 84 } and \boxed{85}", 1.0, " 84 "),
        (r"\boxed{} \boxed{84}", 1.0, "84"),
        (r"\boxed{\text{84}}", 0.0, r"\text{84"),
        (r"\boxed{٨٤}", 0.0, "٨٤"),
        ("84", 0.0, None),
    ],
)
def test_one_turn_is_right_or_wrong(reply: str, reward: float, parsed: str | None) -> None:
    step = new(max_turns=1).step(reply)
    assert step == {"observations": [], "reward": reward, "done": True, "metadata": {"parsed_answer": parsed}}
    assert new(84, max_turns=1).step(reply) == step  # the ground truth may be a number


def test_model_may_correct_a_wrong_answer_until_the_last_turn() -> None:
    env = new(max_turns=3)
    first, second, third = env.step("84"), env.step(r"\boxed{85}"), env.step(r"\boxed{84}")
    assert [step["reward"] for step in (first, second, third)] == [0.0, 0.0, 1.0]
    assert [step["done"] for step in (first, second, third)] == [False, False, True]
    assert message_text(first) == r"There is no answer in a box. Put your final answer in \boxed{}."
    assert message_text(second).startswith("The answer in the box is wrong. Try again.")
    assert third["observations"] == []
    assert env.get_metrics() == {"steps": 3, "correct": 1}
    with pytest.raises(RuntimeError, match="ended after turn 3"):
        env.step(r"\boxed{84}")
    env = new()
    assert [env.step(r"\boxed{85}")["reward"] for _ in range(5)] == [0, 0, 0, 0, 0.5]
    with pytest.raises(RuntimeError, match="ended after turn 5"):
        env.step(r"\boxed{84}")


@given(st.lists(st.sampled_from([r"\boxed{", "}", "84", "{", "\n", "é"])).map("".join))
def test_box_matches_that_of_the_tutorial(reply: str) -> None:
    box = re.search(r"\\boxed\{([^}]+)\}", reply)
    assert new().step(reply)["metadata"]["parsed_answer"] == (box[1] if box else None)


@pytest.mark.parametrize("unit", [r"\boxed{", r"\boxed{}", "{", "}", "\\"])
def test_parsing_is_linear(unit: str) -> None:
    with linear_time():
        new(max_turns=1).step(long_text(unit))
