"""Question answering with a search engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.exact_match import parse_targets
from skyrl_gym.envs.query_env import QueryEnv
from skyrl_gym.envs.row import NO_ROW, parse_settings, read_ground_truth, read_max_turns
from skyrl_gym.envs.search.grading import compute_score
from skyrl_gym.envs.tags import first_between
from skyrl_gym.tools.calls import strip_thoughts
from skyrl_gym.tools.search import SearchToolGroup

MAX_TURNS = 2


@dataclass(frozen=True)
class SearchEnvConfig:
    """`environment.skyrl_gym.search`."""

    log_requests: bool = False
    search_url: str = "http://127.0.0.1:8000/retrieve"
    topk: int = 3
    timeout: float = 30
    """Time limit per request to the search engine, in seconds."""
    tell_failures: bool = False
    """Return search engine failures to the model as a result. Otherwise, a failure makes the rollout invalid."""

    def tool_group(self) -> SearchToolGroup:
        """Create the search tool with these settings."""
        return SearchToolGroup(
            search_url=self.search_url,
            topk=self.topk,
            timeout=self.timeout,
            log_requests=self.log_requests,
            raise_failures=not self.tell_failures,
        )


class SearchEnv(QueryEnv):
    """The model writes `<search>…</search>`, reads `<information>…</information>`, and writes `<answer>…</answer>`.

    The reward is 1 if the answer is in `reward_spec["ground_truth"]["target"]`, else 0. Only the model's own text is
    graded: an answer in a retrieved document does not count. The row may set `max_turns` (default 2).

    Raises:
        ToolFailure: the search engine fails during `step`, unless `tell_failures` is set.
    """

    answer_tags = ("<answer>", "</answer>")

    validates_rows = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        settings = parse_settings("search", env_config, SearchEnvConfig)
        super().__init__(read_max_turns(extras, MAX_TURNS))
        self.ground_truth = read_ground_truth(extras)
        parse_targets(self.ground_truth)
        self.tool_group = settings.tool_group()
        self.init_tool_groups([self.tool_group])
        self._n_searches = 0

    def execute(self, action: str) -> tuple[str, dict[str, Any]]:
        """Run the query in a reply."""
        tool_input = self._parse_action(action)
        self._n_searches += tool_input != [None]
        found = self._execute_tool(self.tool_group.get_name(), "search", tool_input)
        metadata = {"tool_group": self.tool_group.get_name(), "tool_name": "search", "tool_input": tool_input}
        return f"\n<information>{found}</information>\n", metadata

    def _parse_action(self, action: str) -> list[str | None]:
        """Return the tool's arguments: the query in a reply, or None if there is none."""
        return [first_between(action, "<search>", "</search>")]

    def score(self, replies: list[str]) -> float:
        """Score the last answer by exact match."""
        return compute_score("\n".join(map(strip_thoughts, replies)), self.ground_truth)

    def get_metrics(self) -> dict[str, Any]:
        """Return the numbers of turns and of searches."""
        return super().get_metrics() | {"searches": self._n_searches}
