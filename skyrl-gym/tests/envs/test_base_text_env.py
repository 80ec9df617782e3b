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
