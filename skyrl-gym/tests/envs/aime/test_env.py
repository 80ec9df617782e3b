from __future__ import annotations

from typing import Any

import pytest

from skyrl_gym.envs.aime.env import AIMEEnv

PROMPT = [{"role": "user", "content": "What is 6 * 7? End with Answer: and the answer."}]


def new(**env_config: Any) -> AIMEEnv:
    return AIMEEnv(env_config=env_config, extras={"reward_model": {"style": "rule", "ground_truth": "42"}})


@pytest.mark.parametrize(
    ("reply", "reward", "pred"),
    [("6 * 7 = 42\nAnswer: 42", 1.0, "42"), ("Answer: 41", -1.0, "41"), ("42", -1.0, "[INVALID]")],
)
def test_episode_has_one_reply(reply: str, reward: float, pred: str) -> None:
    with new() as env:
        assert env.init(PROMPT) == (PROMPT, {})
        assert env.step(reply) == {
            "observations": [],
            "reward": reward,
            "done": True,
            "metadata": {"acc": reward > 0, "pred": pred, "undecided": None},
        }
        assert env.turns == env.max_turns == 1
        assert env.get_metrics() == {}


def test_env_config_chooses_the_grader() -> None:
    replies = [r"\boxed{42}", "Answer: 42", r"Answer: \frac{84}{2}"]
    rewards = {
        grader: [new(grader=grader).step(reply)["reward"] for reply in replies]
        for grader in ("minerva", "strict_box", "math_verify")
    }
    assert rewards == {"minerva": [-1, 1, -1], "strict_box": [1, -1, -1], "math_verify": [1, 1, 1]}


def test_undecided_answer_counts_as_wrong() -> None:
    env = new(grader="math_verify")
    assert env.get_metrics() == {"undecided": 0}
    step = env.step("Answer: " + "1" * 10_000)
    assert (step["reward"], step["metadata"]["acc"], step["metadata"]["undecided"]) == (-1.0, False, "length")
    assert env.get_metrics() == {"undecided": 1}


def test_reward_model_comes_before_reward_spec() -> None:
    both = {"reward_model": {"ground_truth": "42"}, "reward_spec": {"ground_truth": "41"}}
    assert AIMEEnv({}, both).ground_truth == "42"
    assert AIMEEnv({}, {"reward_spec": {"ground_truth": "41"}}).ground_truth == "41"
