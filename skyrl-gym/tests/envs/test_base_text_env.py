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


def test_new_episode_allows_one_turn() -> None:
    env = BaseTextEnv()
    assert (env.turns, env.max_turns) == (0, 1)


def test_init_returns_the_prompt_unchanged() -> None:
    prompt, info = BaseTextEnv().init(PROMPT)
    assert prompt is PROMPT
    assert info == {}


def test_step_must_be_implemented() -> None:
    with pytest.raises(NotImplementedError, match="BaseTextEnv must implement step"):
        BaseTextEnv().step("yes")


def test_subclass_needs_only_step() -> None:
    with YesEnv() as env:
        assert env.step("no") == {"observations": PROMPT, "reward": 0.0, "done": False, "metadata": {}}
        assert env.step("yes") == {"observations": [], "reward": 1.0, "done": True, "metadata": {}}
        assert env.turns == 2


def test_only_postprocessed_action_is_optional() -> None:
    assert BaseTextEnvStepOutput.__optional_keys__ == {"postprocessed_action"}
    assert BaseTextEnvStepOutput.__required_keys__ == {"observations", "reward", "done", "metadata"}


def test_metrics_are_empty_and_averaged_by_default() -> None:
    assert BaseTextEnv().get_metrics() == {}
    assert BaseTextEnv.aggregate_metrics([{"steps": 1}, {"steps": 2}]) == {"steps": 1.5}


def test_str_names_the_class() -> None:
    assert str(YesEnv()) == "Env(YesEnv)"
