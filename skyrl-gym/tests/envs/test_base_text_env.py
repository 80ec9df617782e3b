from __future__ import annotations

import pytest

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType

PROMPT: ConversationType = [{"role": "user", "content": "Say yes."}]


class YesEnv(BaseTextEnv):
    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        is_yes = action == "yes"
        return BaseTextEnvStepOutput(
            observations=[] if is_yes else PROMPT, reward=float(is_yes), done=is_yes, metadata={}
        )


def test_defaults() -> None:
    env = BaseTextEnv()
    assert (env.turns, env.max_turns) == (0, 1)
    prompt, info = env.init(PROMPT)
    assert prompt is PROMPT
    assert info == env.get_metrics() == {}
    with pytest.raises(NotImplementedError, match="BaseTextEnv must implement step"):
        env.step("yes")


def test_subclass_needs_only_step() -> None:
    with YesEnv() as env:
        assert env.step("no") == {"observations": PROMPT, "reward": 0.0, "done": False, "metadata": {}}
        assert env.step("yes") == {"observations": [], "reward": 1.0, "done": True, "metadata": {}}
        assert env.turns == 2


def test_only_postprocessed_action_is_optional() -> None:
    assert BaseTextEnvStepOutput.__optional_keys__ == {"postprocessed_action"}
    assert BaseTextEnvStepOutput.__required_keys__ == {"observations", "reward", "done", "metadata"}


def test_metrics_are_averaged_by_default() -> None:
    assert BaseTextEnv.aggregate_metrics([{"steps": 1}, {"steps": 2}]) == {"steps": 1.5}
