"""A question whose answer is a number, with a search engine and Python to find it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.asking_env import AskingEnv
from skyrl_gym.envs.gsm8k.grading import compute_score
from skyrl_gym.envs.row import ground_truth_of, max_turns_of, settings_of
from skyrl_gym.envs.search.env import SearchEnvConfig
from skyrl_gym.envs.tags import first_between
from skyrl_gym.error import ToolFailure
from skyrl_gym.isolation.program import Demand
from skyrl_gym.tools.python import PythonCodeExecutorToolGroup

MAX_TURNS = 2
NAME = re.compile(r"\s*<(\w+)>")


@dataclass(frozen=True)
class SearchCodeEnvConfig(SearchEnvConfig):
    """`environment.skyrl_gym.searchcode`."""

    python_timeout: float = 10
    """Seconds of a program."""
    isolation: Demand = "best"
    """Of programs; `namespaces` refuses to run on a machine that cannot close them off."""


class SearchCodeEnv(AskingEnv):
    """The model calls `<tool><search>…</search></tool>` or `<tool><python>…</python></tool>`, reads what comes back,
    and ends with `<solution>…</solution>`.

    1 if the first `#### …` that it wrote is the right number, else 0; what tools wrote is not read.
    """

    answer_tags = ("<solution>", "</solution>")

    def __init__(self, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        settings = settings_of("searchcode", env_config, SearchCodeEnvConfig)
        super().__init__(max_turns_of(extras, MAX_TURNS))
        self.ground_truth = str(ground_truth_of(extras))
        python = PythonCodeExecutorToolGroup(timeout=settings.python_timeout, isolation=settings.isolation)
        self.init_tool_groups([settings.tool_group(), python])

    def ask(self, action: str) -> tuple[str, dict[str, Any]]:
        """Use a tool."""
        metadata: dict[str, Any] = {"tools": [group.get_tool_names() for group in self.tool_groups]}
        try:
            name, told = self._call_in(action)
            group = self.tool_to_toolgroup[name]
            metadata |= {"tool_group": group, "tool_name": name, "tool_input": [told]}
            return str(self._execute_tool(group, name, [told])), metadata
        except ToolFailure:
            raise
        except ValueError as error:  # of the model
            return str(error), metadata

    def score(self, replies: list[str]) -> float:
        """Whether the first number that is marked is the right one."""
        return compute_score("\n".join(replies), self.ground_truth)

    def _call_in(self, action: str) -> tuple[str, str]:
        """The tool that a reply calls, and what with; ValueError for the model if there is none."""
        call = first_between(action, "<tool>", "</tool>")
        if call is None:
            raise ValueError("Call a tool with <tool><name>input</name></tool>, or end with <solution>…</solution>.")
        name = NAME.match(call)
        if name is None or (told := first_between(call, f"<{name[1]}>", f"</{name[1]}>")) is None:
            raise ValueError("Write the tool's name as a tag around its input: <tool><name>input</name></tool>.")
        if name[1] not in self.tool_to_toolgroup:
            raise ValueError(f"There is no tool {name[1]}. Tools: {', '.join(sorted(self.tool_to_toolgroup))}.")
        return name[1], told.strip()
