from __future__ import annotations

import pytest

from skyrl_gym.envs.base_text_env import BaseTextEnv, ConversationType

PROMPT: ConversationType = [{"role": "user", "content": "Say yes."}]


def test_defaults() -> None:
    env = BaseTextEnv()
    assert (env.turns, env.max_turns) == (0, 1)
    prompt, info = env.init(PROMPT)
    assert prompt is PROMPT
    assert info == env.get_metrics() == {}
    with pytest.raises(NotImplementedError, match="BaseTextEnv must implement step"):
        env.step("yes")


def test_metrics_are_averaged_by_default() -> None:
    assert BaseTextEnv.aggregate_metrics([{"steps": 1}, {"steps": 2}]) == {"steps": 1.5}
