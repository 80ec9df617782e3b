"""Text to SQL: the model explores a database with queries, then submits the query that answers the question."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_gym.envs.query_env import QueryEnv
from skyrl_gym.envs.row import NO_ROW, parse_settings, read_ground_truth, read_max_turns
from skyrl_gym.envs.sql.grading import Match, compute_score, extract_query, join_replies
from skyrl_gym.tools.sql import SQLCodeExecutorToolGroup

MAX_TURNS = 5
FOLDERS = {"synsql": "SynSQL-2.5M/databases", "spider": "spider/database", "bird": "bird/train/train_databases"}


@dataclass(frozen=True)
class Text2SQLEnvConfig:
    """`environment.skyrl_gym.text2sql`."""

    db_path: str = "/home/ray/default/sql_data"
    """Folder with all databases: `SynSQL-2.5M/databases`, `spider/database` and `bird/train/train_databases`."""
    match: Match = "set"
    """`set`: the same rows as the ground truth, ignoring order and duplicates, as in Spider and BIRD. `exact`: the same
    rows with the same counts and, if the ground truth orders its rows, in that order."""


class SQLEnv(QueryEnv):
    """The model queries with `<sql>…</sql>`, thinks in `<think>…</think>`, and ends with `<solution>…</solution>`.

    The reward is -1 for a wrong format, 1 if the query's result matches `reward_spec["ground_truth"]`, else 0. The
    query must read a table that the ground truth reads: a constant is not an answer. The row selects the database with
    `data` (synsql, spider or bird) and `db_id`. Databases are opened read-only.

    Raises:
        AssertionError: the row has no `db_id` or no ground truth.
        NotImplementedError: the row's `data` is unknown.
        FileNotFoundError: the database does not exist.
    """

    answer_tags = ("<solution>", "</solution>")

    validates_rows = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        super().__init__(read_max_turns(extras, MAX_TURNS))
        self._settings = parse_settings("text2sql", env_config, Text2SQLEnvConfig)
        assert "db_id" in extras, (
            f"db_id field is required: add the database's name to the row, which has {sorted(extras)}"
        )
        self.db_id = str(extras["db_id"])
        self.gold_sql = str(read_ground_truth(extras))
        data = extras.get("data")
        if data not in FOLDERS:
            raise NotImplementedError(f"data={data!r} of the row is unknown; use one of {', '.join(FOLDERS)}")
        folder = Path(self._settings.db_path) / FOLDERS[data]
        self.db_file = folder / self.db_id / f"{self.db_id}.sqlite"
        if not self.db_file.is_file():
            raise FileNotFoundError(
                f"the database {self.db_file} does not exist; set environment.skyrl_gym.text2sql.db_path to its root"
            )
        self.tool_group = SQLCodeExecutorToolGroup(str(self.db_file.parents[1]))
        self.init_tool_groups([self.tool_group])

    def execute(self, action: str) -> tuple[str, dict[str, Any]]:
        """Run the query in a reply."""
        group, name, tool_input = self._parse_action(action)
        result = self._execute_tool(group, name, tool_input)
        return result, {"tool_group": group, "tool_name": name, "tool_input": tool_input}

    def _parse_action(self, action: str) -> tuple[str, str, tuple[Any, ...]]:
        """Return the tool's group, name and arguments. The query is None if the reply has none."""
        return self.tool_group.get_name(), "sql", (self.db_id, extract_query(action), self.max_turns - self.turns)

    def score(self, replies: list[str]) -> float:
        """Score the format and the result of the solution."""
        return compute_score(join_replies(replies), self.gold_sql, self.db_file, self._settings.match)
