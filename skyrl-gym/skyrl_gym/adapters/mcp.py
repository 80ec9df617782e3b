"""Questions to answer with the tools of MCP servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.adapters.settings import read_settings
from skyrl_gym.entry_point import load_attribute
from skyrl_gym.envs.row import ground_truth_of, max_turns_of, settings_of
from skyrl_gym.envs.tool_env import ToolEnv
from skyrl_gym.exact_match import is_match, normalize_answer, targets_of
from skyrl_gym.tools.core import Prefixed, ToolGroup
from skyrl_gym.tools.mcp import MCPServerConfig, MCPToolGroup

MAX_TURNS = 10

Reward = Callable[[str, Mapping[str, Any]], float | None]
"""From an answer and the row to a reward; None: nobody can tell."""


@dataclass(frozen=True)
class MCPEnvConfig:
    """`environment.skyrl_gym.mcp`."""

    servers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """A `command` with `args` and `env`, or a `url`, for each name; `timeout` in seconds of a call. Where two servers
    have a tool of one name, give one of them a `prefix`: its `read` is called `<prefix>_read`."""
    reward: str = "exact"
    """`exact`: the answer is one of `reward_spec["ground_truth"]`, but for case, articles and punctuation. `contains`:
    one of them is in it, word for word, as it is in a list of everything. `module:function`: what that returns for the
    answer and the row."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError(
                "environment.skyrl_gym.mcp.servers names no server; set for example "
                "environment.skyrl_gym.mcp.servers.files.url=http://localhost:8000/mcp"
            )


class MCPEnv(ToolEnv):
    """The model calls tools of MCP servers, and answers with a reply that calls none.

    Every episode has sessions of its own; programs are started for it, and end with it.

    Raises: `ToolFailure` where a server cannot be reached.
    """

    WAY_OUT = "set environment.skyrl_gym.mcp.servers.{group}.prefix"

    def __init__(self, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        settings = read_settings(MCPEnvConfig, "mcp", env_config, extras)
        self._extras = extras
        self._reward = _reward(settings.reward, extras)
        servers = {
            name: settings_of(f"mcp.servers.{name}", told, MCPServerConfig) for name, told in settings.servers.items()
        }
        with ExitStack() as opened:
            groups: list[ToolGroup] = []
            for name, server in servers.items():
                group = MCPToolGroup(name, server)
                opened.callback(group.close)
                groups.append(group if server.prefix is None else Prefixed(group, server.prefix))
            super().__init__(groups, max_turns_of(extras, MAX_TURNS))
            opened.pop_all()  # the environment closes them from now on

    def score(self, answer: str) -> float | None:
        """See `ToolEnv`."""
        return self._reward(answer, self._extras)


def _reward(name: str, extras: Mapping[str, Any]) -> Reward:
    if name not in ("exact", "contains"):
        function: Reward = load_attribute(name)
        return function
    targets = targets_of(ground_truth_of(extras))
    if name == "exact":
        return lambda answer, _: float(is_match(answer, targets))
    words = [f" {normalize_answer(target)} " for target in targets]
    if "  " in words:
        raise ValueError(f"environment.skyrl_gym.mcp.reward=contains: nothing is left of one of {targets} to look for")
    return lambda answer, _: float(any(target in f" {normalize_answer(answer)} " for target in words))
