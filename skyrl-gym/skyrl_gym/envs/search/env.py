"""A question, a search engine, and an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.row import ground_truth_of, max_turns_of, settings_of
from skyrl_gym.envs.search.grading import compute_score, targets_of
from skyrl_gym.envs.tags import first_between
from skyrl_gym.tools.search import SearchToolGroup

MAX_TURNS = 2


@dataclass(frozen=True)
class SearchEnvConfig:
    """`environment.skyrl_gym.search`."""

    log_requests: bool = False
    search_url: str = "http://127.0.0.1:8000/retrieve"
    topk: int = 3
    timeout: float = 30
    """Seconds of one attempt to reach the server."""
    tell_failures: bool = False
    """Let the model read that the server failed, as if it were a result. Otherwise the rollout is invalid."""


class SearchEnv(BaseTextEnv):
    """The model asks `<search>…</search>`, reads `<information>…</information>`, and answers `<answer>…</answer>`.

    1 for an answer that is one of `reward_spec["ground_truth"]["target"]`, else 0. Only what the model wrote is read:
    an answer in a document is nobody's. Turns: the row's `max_turns`, else two.

    Raises: `ToolFailure` from `step` where the search engine fails, unless `tell_failures` is set.
    """

    def __init__(self, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        super().__init__()
        settings = settings_of("search", env_config, SearchEnvConfig)
        self.ground_truth = ground_truth_of(extras)
        targets_of(self.ground_truth)
        self.max_turns = max_turns_of(extras, MAX_TURNS)
        self.chat_history: ConversationType = []
        self.tool_group = SearchToolGroup(
            search_url=settings.search_url,
            topk=settings.topk,
            timeout=settings.timeout,
            log_requests=settings.log_requests,
            raise_failures=not settings.tell_failures,
        )
        self.init_tool_groups([self.tool_group])
        self._n_searches = 0

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Search, or score the answer."""
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        if self.turns >= self.max_turns or ("<answer>" in action and "</answer>" in action):
            return BaseTextEnvStepOutput(observations=[], reward=self._score(), done=True, metadata={})
        query = first_between(action, "<search>", "</search>")
        self._n_searches += query is not None
        found = self._execute_tool(self.tool_group.get_name(), "search", [query])
        message = {"role": "user", "content": f"\n<information>{found}</information>\n"}
        self.chat_history.append(message)
        metadata = {"tool_group": self.tool_group.get_name(), "tool_name": "search", "tool_input": [query]}
        return BaseTextEnvStepOutput(observations=[message], reward=0.0, done=False, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Turns, and how many of them asked the search engine."""
        return {"steps": self.turns, "searches": self._n_searches}

    def _score(self) -> float:
        said = (message["content"] for message in self.chat_history if message["role"] == "assistant")
        return compute_score("\n".join(said), self.ground_truth)
