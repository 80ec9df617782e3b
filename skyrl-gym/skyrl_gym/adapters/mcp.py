"""Question answering with the tools of MCP servers."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.adapters.settings import read_settings
from skyrl_gym.envs.entry_point import load_attribute
from skyrl_gym.envs.exact_match import is_match, is_mentioned, normalize_answer, parse_targets
from skyrl_gym.envs.row import NO_ROW, parse_settings, read_ground_truth, read_max_turns, reads_images
from skyrl_gym.envs.tool_env import ToolEnv
from skyrl_gym.error import InvalidSettings
from skyrl_gym.tools.core import Prefixed, ToolGroup
from skyrl_gym.tools.mcp import MCPServerConfig, MCPToolGroup

MAX_TURNS = 10

Reward = Callable[[str, Mapping[str, Any]], float | None]
"""A function from an answer and the row to a reward, or to None if the reward is unknown."""


@dataclass(frozen=True)
class MCPEnvConfig:
    """`environment.skyrl_gym.mcp`."""

    servers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Servers by name. Each has a `command`, `args` and `env`, or a `url`. `timeout` is the time limit of a call in
    seconds. `prefix` renames a server's tool `read` to `<prefix>_read`, in case two servers have tools with the same
    name."""
    reward: str = "exact"
    """`exact`: the answer is in `reward_spec["ground_truth"]`, ignoring case, articles and punctuation. `contains`: it
    contains one of them word for word, with at most 20 other words and not in a list of alternatives.
    `module:function`: a function that takes the answer and the row, and returns the reward."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise InvalidSettings(
                "environment.skyrl_gym.mcp.servers is empty; set, for example, "
                "environment.skyrl_gym.mcp.servers.files.url=http://localhost:8000/mcp"
            )


class MCPEnv(ToolEnv):
    """The model calls tools of MCP servers. A reply without a call is the answer.

    Every episode has its own sessions. Server programs are started for the episode and end with it. Images in results
    are shown to a model that reads images. A text model reads "[image]".

    Raises:
        ToolFailure: a server cannot be reached.
    """

    DUPLICATE_FIX = "set environment.skyrl_gym.mcp.servers.{group}.prefix"

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        settings = read_settings(MCPEnvConfig, "mcp", env_config, extras)
        self._extras = extras
        self._reward = _reward(settings.reward, extras)
        servers = {
            name: parse_settings(f"mcp.servers.{name}", server, MCPServerConfig)
            for name, server in settings.servers.items()
        }
        with ExitStack() as stack:
            groups: list[ToolGroup] = []
            for name, server in servers.items():
                group = MCPToolGroup(name, server, shows_images=reads_images(extras))
                stack.callback(group.close)
                groups.append(group if server.prefix is None else Prefixed(group, server.prefix))
            super().__init__(groups, read_max_turns(extras, MAX_TURNS))
            stack.pop_all()  # from here on, the environment closes the groups

    def score(self, answer: str) -> float | None:
        """Score the answer with the configured reward function."""
        return self._reward(answer, self._extras)


def _reward(name: str, extras: Mapping[str, Any]) -> Reward:
    if name not in ("exact", "contains"):
        function: Reward = load_attribute(name)
        return function
    targets = parse_targets(read_ground_truth(extras))
    if name == "exact":
        return lambda answer, _: float(is_match(answer, targets))
    if not all(map(normalize_answer, targets)):
        raise ValueError(
            f"environment.skyrl_gym.mcp.reward=contains: one of {targets} normalizes to nothing; use exact"
        )
    return lambda answer, _: float(is_mentioned(answer, targets))
