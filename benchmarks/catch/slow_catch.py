"""Catch with turns that take as long as remote tool calls."""

import asyncio
import random

from examples.catch.env import CatchEnv
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput

USUAL_S, RARE_S, RARE_SHARE = 0.05, 1.0, 0.01


class SlowCatchEnv(CatchEnv):
    """A game whose turns take 50 ms, or one second in one of a hundred turns."""

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        await asyncio.sleep(RARE_S if random.random() < RARE_SHARE else USUAL_S)
        return self.step(action)
