"""A single reply without an environment reward, for rewards computed elsewhere."""

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.row import NO_ROW


class ReplyEnv(BaseTextEnv):
    """One reply to the prompt, with reward 0. The trainer's reward functions and reward models add theirs."""

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """End the episode."""
        self.turns += 1
        return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={})
