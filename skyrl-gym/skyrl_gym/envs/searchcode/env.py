"""Numeric question answering with a search engine and Python."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.gsm8k.grading import compute_score
from skyrl_gym.envs.query_env import QueryEnv
from skyrl_gym.envs.row import NO_ROW, parse_settings, read_ground_truth, read_max_turns
from skyrl_gym.envs.search.env import SearchEnvConfig
from skyrl_gym.envs.tags import first_between, last_between
from skyrl_gym.error import ToolFailure
from skyrl_gym.isolation.program import Isolation
from skyrl_gym.tools.calls import strip_thoughts
from skyrl_gym.tools.python import PythonCodeExecutorToolGroup

MAX_TURNS = 2
NAME = re.compile(r"\s*<(\w+)>")


@dataclass(frozen=True)
class SearchCodeEnvConfig(SearchEnvConfig):
    """`environment.skyrl_gym.searchcode`."""

    python_timeout: float = 10
    """Time limit per program, in seconds."""
    isolation: Isolation = "best"
    """Isolation of programs. `best` raises where the machine cannot keep programs from the user's files and processes,
    `namespaces` where it has no namespaces. `limits` runs programs anyway, within limits on time and memory."""


class SearchCodeEnv(QueryEnv):
    """The model calls `<tool><search>…</search></tool>` or `<tool><python>…</python></tool>`, reads the result, and
    ends with `<solution>…</solution>`.

    The reward is 1 if the first `#### …` in the last solution is the right number, else 0. Tool output is not read.
    """

    answer_tags = ("<solution>", "</solution>")

    validates_rows = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        settings = parse_settings("searchcode", env_config, SearchCodeEnvConfig)
        super().__init__(read_max_turns(extras, MAX_TURNS))
        self.ground_truth = str(read_ground_truth(extras))
        python = PythonCodeExecutorToolGroup(timeout=settings.python_timeout, isolation=settings.isolation)
        self.init_tool_groups([settings.tool_group(), python])

    def execute(self, action: str) -> tuple[str, dict[str, Any]]:
        """Run the tool call in a reply."""
        metadata: dict[str, Any] = {"tools": [group.get_tool_names() for group in self.tool_groups]}
        try:
            group, name, tool_input = self._parse_action(action)
            metadata |= {"tool_group": group, "tool_name": name, "tool_input": tool_input}
            return str(self._execute_tool(group, name, tool_input)), metadata
        except ToolFailure:
            raise
        except ValueError as error:  # the model's mistake
            return str(error), metadata

    def score(self, replies: list[str]) -> float:
        """Return 1 if the first `#### …` in the last solution is the right number, else 0."""
        visible = "\n".join(map(strip_thoughts, replies))
        return compute_score(last_between(visible, *self.answer_tags) or "", self.ground_truth)

    def _parse_action(self, action: str) -> tuple[str, str, list[Any]]:
        """Return the group, the name and the arguments of the called tool.

        Raises:
            ValueError: the reply has no valid call. The message is for the model.
        """
        call = first_between(action, "<tool>", "</tool>")
        if call is None:
            raise ValueError("Call a tool with <tool><name>input</name></tool>, or end with <solution>…</solution>.")
        name = NAME.match(call)
        if name is None or (tool_input := first_between(call, f"<{name[1]}>", f"</{name[1]}>")) is None:
            raise ValueError("Write the tool's name as a tag around its input: <tool><name>input</name></tool>.")
        if name[1] not in self.tool_to_toolgroup:
            raise ValueError(f"There is no tool {name[1]}. Tools: {', '.join(sorted(self.tool_to_toolgroup))}.")
        return self.tool_to_toolgroup[name[1]], name[1], [tool_input.strip()]
