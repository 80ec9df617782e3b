"""A question, a search engine, and an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.asking_env import AskingEnv
from skyrl_gym.envs.row import ground_truth_of, max_turns_of, settings_of
from skyrl_gym.envs.search.grading import compute_score
from skyrl_gym.envs.tags import first_between
from skyrl_gym.exact_match import targets_of
from skyrl_gym.tools.search import SearchToolGroup

MAX_TURNS = 2


@dataclass(frozen=True)
class SearchEnvConfig:
    """`environment.skyrl_gym.search`."""

    log_requests: bool = False
    search_url: str = "http://127.0.0.1:8000/retrieve"
    topk: int = 3
    timeout: float = 30
    """Seconds of one attempt to reach the search engine."""
    tell_failures: bool = False
    """Let the model read that the search engine failed, as if it were a result. Otherwise the rollout is invalid."""

    def tool_group(self) -> SearchToolGroup:
        """The tool of these settings."""
        return SearchToolGroup(
            search_url=self.search_url,
            topk=self.topk,
            timeout=self.timeout,
            log_requests=self.log_requests,
            raise_failures=not self.tell_failures,
        )


class SearchEnv(AskingEnv):
    """The model asks `<search>…</search>`, reads `<information>…</information>`, and answers `<answer>…</answer>`.

    1 for an answer that is one of `reward_spec["ground_truth"]["target"]`, else 0. Only what the model wrote is read:
    an answer in a document is nobody's. Turns: the row's `max_turns`, else two.

    Raises: `ToolFailure` from `step` where the search engine fails, unless `tell_failures` is set.
    """

    answer_tags = ("<answer>", "</answer>")

    def __init__(self, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        settings = settings_of("search", env_config, SearchEnvConfig)
        super().__init__(max_turns_of(extras, MAX_TURNS))
        self.ground_truth = ground_truth_of(extras)
        targets_of(self.ground_truth)
        self.tool_group = settings.tool_group()
        self.init_tool_groups([self.tool_group])
        self._n_searches = 0

    def ask(self, action: str) -> tuple[str, dict[str, Any]]:
        """Search."""
        query = first_between(action, "<search>", "</search>")
        self._n_searches += query is not None
        found = self._execute_tool(self.tool_group.get_name(), "search", [query])
        metadata = {"tool_group": self.tool_group.get_name(), "tool_name": "search", "tool_input": [query]}
        return f"\n<information>{found}</information>\n", metadata

    def score(self, replies: list[str]) -> float:
        """Exact match of the last answer."""
        return compute_score("\n".join(replies), self.ground_truth)

    def get_metrics(self) -> dict[str, Any]:
        """Turns, and how many of them asked the search engine."""
        return super().get_metrics() | {"searches": self._n_searches}
