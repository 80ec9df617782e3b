"""Environments that keep every rule of `skyrl env check`, and rows for them."""

from typing import Any

from gym_kit.messages import user
from skyrl_gym.envs.base_text_env import BaseTextEnv

ROW = {"prompt": user("6 * 7?"), "reward_spec": {"ground_truth": "42"}, "max_turns": 3}


class GoodEnv(BaseTextEnv):
    """Report the length of each reply, for three turns."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.max_turns = extras["max_turns"]

    def step(self, action: str) -> Any:
        self.turns += 1
        done = self.turns >= self.max_turns
        observations = [] if done else user(f"You wrote {len(action)} characters.")
        return {"observations": observations, "reward": 0.5, "done": done, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": self.turns}
