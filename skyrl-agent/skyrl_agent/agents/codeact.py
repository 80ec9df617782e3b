"""An agent with a shell and an editor, as in CodeAct (Wang et al., 2024, arXiv:2402.01030)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_agent.agents.react import ReActAgent
from skyrl_agent.tools.base import BaseTool
from skyrl_gym.envs.entry_point import suggest_name
from skyrl_train.errors import ConfigError

SWITCHES = {
    "enable_bash_tool": "execute_bash",
    "enable_cmd": "execute_bash",
    "enable_editor": "str_replace_editor",
    "enable_think": "think",
    "enable_finish": "submit",
}
"""Switches in SkyRL-Agent's task files, and the tools that they enable."""

UNSUPPORTED = {
    "enable_browsing": "there is no browser; the tools search_engine and web_browser can be named in a list of tools",
    "enable_jupyter": "there is no notebook; the shell runs Python",
    "enable_llm_editor": "no model edits files; use enable_editor",
    "enable_mcp": "name the tools of an MCP server in a list of tools",
    "enable_search": "name local_search or search_engine in a list of tools",
}
"""Switches that must be false, with the reasons."""


class CodeActAgent(ReActAgent):
    """An agent that works in its trajectory's `Workspace`, with one tool call per turn."""

    max_repeats: ClassVar[int | None] = 4

    @classmethod
    def create_tools(cls, tools: Any) -> dict[str, BaseTool]:
        """Create a trajectory's tools from a list, or from a section of switches such as enable_bash_tool.

        Raises:
            ConfigError: a tool or a switch does not exist, or an unsupported switch is true.
        """
        if not isinstance(tools, Mapping):
            return super().create_tools(tools)
        names = []
        for switch, is_on in tools.items():
            if switch not in SWITCHES and switch not in UNSUPPORTED:
                known = [*SWITCHES, *UNSUPPORTED]
                raise ConfigError(
                    f"tools: there is no switch {switch!r}.{suggest_name(switch, known)} "
                    f"The switches are {', '.join(known)}"
                )
            if is_on and switch in UNSUPPORTED:
                raise ConfigError(f"tools.{switch}=true is not supported: {UNSUPPORTED[switch]}; set it to false")
            if is_on:
                names.append(SWITCHES[switch])
        if not names:
            raise ConfigError(
                "tools: no tool is enabled; set enable_bash_tool, enable_editor and enable_finish to true"
            )
        return super().create_tools(tuple(dict.fromkeys(names)))
