"""A question whose answer is a number, with a search engine and Python to find it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.gsm8k.grading import compute_score
from skyrl_gym.envs.row import ground_truth_of, max_turns_of, settings_of
from skyrl_gym.envs.tags import first_between
from skyrl_gym.error import ToolFailure
from skyrl_gym.tools.python import PythonCodeExecutorToolGroup
from skyrl_gym.tools.search import SearchToolGroup

MAX_TURNS = 2
NAME = re.compile(r"\s*<(\w+)>")


@dataclass(frozen=True)
class SearchCodeEnvConfig:
    """`environment.skyrl_gym.searchcode`."""

    log_requests: bool = False
    search_url: str = "http://127.0.0.1:8000/retrieve"
    topk: int = 3
    timeout: float = 30
    """Seconds of one attempt to reach the search engine."""
    python_timeout: float = 10
    """Seconds of a program."""
    tell_failures: bool = False
    """Let the model read that the search engine failed. Otherwise the rollout is invalid."""


class SearchCodeEnv(BaseTextEnv):
    """The model calls `<tool><search>…</search></tool>` or `<tool><python>…</python></tool>`, reads what comes back,
    and ends with `<solution>…</solution>`.

    1 if the first `#### …` that it wrote is the right number, else 0; what tools wrote is not read.
    """

    def __init__(self, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        super().__init__()
        settings = settings_of("searchcode", env_config, SearchCodeEnvConfig)
        self.ground_truth = str(ground_truth_of(extras))
        self.max_turns = max_turns_of(extras, MAX_TURNS)
        self.chat_history: ConversationType = []
        search = SearchToolGroup(
            search_url=settings.search_url,
            topk=settings.topk,
            timeout=settings.timeout,
            log_requests=settings.log_requests,
            raise_failures=not settings.tell_failures,
        )
        self.init_tool_groups([search, PythonCodeExecutorToolGroup(timeout=settings.python_timeout)])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Use a tool, or score what was said."""
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        if self.turns >= self.max_turns or ("<solution>" in action and "</solution>" in action):
            return BaseTextEnvStepOutput(observations=[], reward=self._score(), done=True, metadata={})
        metadata: dict[str, Any] = {"tools": [group.get_tool_names() for group in self.tool_groups]}
        try:
            name, told = self._call_in(action)
            group = self.tool_to_toolgroup[name]
            metadata |= {"tool_group": group, "tool_name": name, "tool_input": [told]}
            text = str(self._execute_tool(group, name, [told]))
        except ToolFailure:
            raise
        except ValueError as error:  # of the model
            text = str(error)
        message = {"role": "user", "content": text}
        self.chat_history.append(message)
        return BaseTextEnvStepOutput(observations=[message], reward=0.0, done=False, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Turns."""
        return {"steps": self.turns}

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

    def _score(self) -> float:
        said = (message["content"] for message in self.chat_history if message["role"] == "assistant")
        return compute_score("\n".join(said), self.ground_truth)
