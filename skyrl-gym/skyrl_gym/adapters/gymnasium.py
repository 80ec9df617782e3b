"""Gymnasium environments as text environments: observations become text, and replies become actions.

environment.env_class=gymnasium environment.skyrl_gym.gymnasium.id=FrozenLake-v1
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyrl_gym.adapters.actions import ActionError
from skyrl_gym.adapters.ansi import strip_colors
from skyrl_gym.adapters.observations import append_observation, format_observation, user_message
from skyrl_gym.adapters.settings import NO_LIMIT, read_settings, reset_arguments
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.row import read_max_turns
from skyrl_gym.error import InvalidSettings
from skyrl_gym.optional import require

if TYPE_CHECKING:
    import gymnasium

ACTION_NAMES = {
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "MountainCar": ("left", "none", "right"),
    "Taxi": ("south", "north", "east", "west", "pick up", "drop off"),
}
"""Action names of the environments that come with Gymnasium. Gymnasium documents them only in prose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GymnasiumSettings:
    """The section `environment.skyrl_gym.gymnasium`.

    id: the argument of `gymnasium.make`, e.g. ``FrozenLake-v1``. ``my_package:Mine-v0`` imports `my_package` first.
    kwargs: the other arguments of `gymnasium.make`.
    reset: arguments of `reset`. A row's `seed` and `reset`, or its `extra_info`'s, override them.
    action_names: the names of a discrete space's actions, in order. Gymnasium's own environments have defaults.
    observation: the field to show, or a template with `{field}`, e.g. ``Your sum is {0}.``. Defaults to the text that
        the environment renders (`render_mode="ansi"`), or the whole observation if it renders none.
    describe_action: True to list the actions in the prompt.
    illegal: the rule for a reply without a valid action: ``retry`` asks for a new one, ``end`` ends the episode.
    illegal_reward: the reward of a turn with such a reply.
    """

    id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reset: Mapping[str, Any] = field(default_factory=dict)
    action_names: Sequence[str] | None = None
    observation: str | None = None
    describe_action: bool = True
    illegal: str = "retry"
    illegal_reward: float = 0.0

    def __post_init__(self) -> None:
        if self.illegal not in ("retry", "end"):
            raise ValueError(f"illegal={self.illegal!r} is unknown; use retry or end")


class GymnasiumEnv(BaseTextEnv):
    """One episode of a Gymnasium environment. A turn's reward is the reward of its step."""

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        super().__init__()
        require("gymnasium", "gymnasium", "Gymnasium environments")
        from skyrl_gym.adapters.gymnasium_actions import ActionReader

        self.settings = read_settings(GymnasiumSettings, "gymnasium", env_config, extras)
        self.max_turns = read_max_turns(extras, NO_LIMIT)
        self._reset_arguments = reset_arguments(self.settings.reset, extras)
        self._env: gymnasium.Env[Any, Any] | None = _make(self.settings)
        try:
            self._actions = ActionReader(self._env.action_space, _action_names(self.settings, self._env.spec))
        except BaseException:
            self.close()
            raise
        self._n_invalid = 0
        self._is_done = False
        self._is_truncated = False

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Reset the environment, and append the observation and the list of actions to the prompt."""
        observation, _ = self._get_running().reset(**self._reset_arguments)
        parts = [self._format(observation)]
        if self.settings.describe_action:
            parts.append(self._actions.instructions)
        return append_observation(prompt, "\n\n".join(filter(None, parts))), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Take the action in the reply."""
        env = self._get_running()
        self.turns += 1
        try:
            chosen = self._actions.read(action)
        except ActionError as problem:
            self._n_invalid += 1
            self._is_done = self.settings.illegal == "end"
            text = f"{problem} {self._actions.instructions}"
            return self._output(lambda: text, self.settings.illegal_reward, {"action": None})
        observation, reward, terminated, truncated, _ = env.step(chosen)
        self._is_done, self._is_truncated = bool(terminated or truncated), bool(truncated)
        return self._output(lambda: self._format(observation), float(reward), {"action": chosen})

    def close(self) -> None:
        """Close the environment. Idempotent."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def get_metrics(self) -> dict[str, Any]:
        """Return the numbers of turns and of invalid actions, and 1 if the environment truncated the episode."""
        return {"steps": self.turns, "invalid_actions": self._n_invalid, "truncated": int(self._is_truncated)}

    def _get_running(self) -> gymnasium.Env[Any, Any]:
        if self._env is None or self._is_done:
            raise RuntimeError("this episode is over; create a new GymnasiumEnv for the next episode")
        return self._env

    def _output(self, text: Callable[[], str], reward: float, metadata: dict[str, Any]) -> BaseTextEnvStepOutput:
        self._is_done = self._is_done or self.turns >= self.max_turns
        observations = [] if self._is_done else [user_message(text())]
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=self._is_done, metadata=metadata)

    def _format(self, observation: Any) -> str:
        env = self._get_running()
        if self.settings.observation is None and env.render_mode == "ansi":
            return strip_colors(str(env.render())).strip("\n")
        return format_observation(observation, self.settings.observation)


def _make(settings: GymnasiumSettings) -> gymnasium.Env[Any, Any]:
    """Make the environment, with text rendering if it has any.

    Raises:
        InvalidSettings: the id is unknown.
    """
    import gymnasium

    module, _, name = settings.id.rpartition(":")
    if module:
        importlib.import_module(module)
    try:
        spec = gymnasium.spec(name)
    except gymnasium.error.Error as problem:
        raise InvalidSettings(f"environment.skyrl_gym.gymnasium.id={settings.id!r}: {problem}") from problem
    kwargs = {"disable_env_checker": True, **settings.kwargs}
    if "render_mode" not in kwargs and settings.observation is None and "ansi" in _render_modes(spec):
        kwargs["render_mode"] = "ansi"
    return gymnasium.make(spec, **kwargs)


def _render_modes(spec: gymnasium.envs.registration.EnvSpec) -> Sequence[str]:
    from gymnasium.envs.registration import load_env_creator

    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    return (getattr(creator, "metadata", None) or {}).get("render_modes") or ()


def _action_names(settings: GymnasiumSettings, spec: gymnasium.envs.registration.EnvSpec | None) -> Sequence[str]:
    if settings.action_names is not None:
        return settings.action_names
    is_of_gymnasium = spec is not None and str(spec.entry_point).startswith("gymnasium.")
    return ACTION_NAMES.get(spec.name, ()) if spec is not None and is_of_gymnasium else ()
