"""Rewards from a function in a file, called with verl's arguments for custom reward functions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.entry_point import load_from_file
from skyrl_gym.envs.row import NO_ROW, parse_settings, read_extra_info, to_python
from skyrl_gym.error import InvalidAnswer, InvalidSettings, InvalidSpec


@dataclass(frozen=True)
class RewardFunctionConfig:
    """`environment.skyrl_gym.reward_function`, filled in by `custom_reward_function`."""

    path: str = ""
    """Python file that holds the function."""
    name: str = "compute_score"
    """Name of the function in the file."""


class RewardFunctionEnv(BaseTextEnv):
    """One reply, scored by ``function(data_source=…, solution_str=…, ground_truth=…, extra_info=…)``.

    The function returns a number, or a dict with the number as `score`. All other numbers in the dict become metrics.
    If the function raises, the rollout is invalid instead of getting a reward of 0.

    Raises:
        InvalidSettings: the file has no such function.
    """

    validates_rows = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        super().__init__()
        settings = parse_settings("reward_function", env_config, RewardFunctionConfig)
        if not settings.path:
            raise InvalidSettings(
                "environment.skyrl_gym.reward_function.path is empty; set custom_reward_function.path"
            )
        key = f"environment.skyrl_gym.reward_function.name={settings.name} (custom_reward_function.name)"
        try:
            self._function = load_from_file(settings.path, settings.name)
        except InvalidSpec as error:
            raise InvalidSettings(f"{key}: {error}") from error
        if not callable(self._function):
            raise InvalidSettings(f"{key} is {self._function!r}; it must be a function")
        specs = [extras[name] for name in ("reward_spec", "reward_model") if extras.get(name) is not None]
        spec: Mapping[str, Any] = specs[0] if specs else {}
        self._arguments = {
            "data_source": extras.get("data_source"),
            "ground_truth": to_python(spec.get("ground_truth")),
            "extra_info": read_extra_info(extras),
        }
        self._metrics: dict[str, float] = {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score the reply."""
        self.turns += 1
        result = self._function(solution_str=action, **self._arguments)
        scores = dict(result) if isinstance(result, Mapping) else {"score": result}
        self._metrics = {str(name): float(value) for name, value in scores.items() if _is_number(value)}
        if "score" not in self._metrics:
            raise InvalidAnswer(
                f"the reward function {self._function.__name__} returned {result!r}; return a finite number, or a dict "
                "with a finite number as score"
            )
        return BaseTextEnvStepOutput(observations=[], reward=self._metrics["score"], done=True, metadata={})

    def get_metrics(self) -> dict[str, Any]:
        """Return the numbers in the function's result."""
        return dict(self._metrics)


def _is_number(value: Any) -> bool:
    value = to_python(value)
    return isinstance(value, int | float) and math.isfinite(value)
