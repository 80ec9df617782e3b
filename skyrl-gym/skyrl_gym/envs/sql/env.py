"""A question to a database: look around in it, then give the query that answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_gym.envs.asking_env import AskingEnv
from skyrl_gym.envs.row import ground_truth_of, max_turns_of, settings_of
from skyrl_gym.envs.sql.grading import Match, compute_score, conversation_of, extract_query
from skyrl_gym.tools.sql import SQLCodeExecutorToolGroup

MAX_TURNS = 5
FOLDERS = {
    "synsql": "SynSQL-2.5M/databases",
    "spider": "spider/database",
    "bird": "bird/train/train_databases",
}


@dataclass(frozen=True)
class SQLEnvConfig:
    """`environment.skyrl_gym.text2sql`."""

    db_path: str = "/home/ray/default/sql_data"
    """The folder of all databases: `SynSQL-2.5M/databases`, `spider/database` and `bird/train/train_databases`."""
    match: Match = "exact"
    """`exact`: the rows of the right query, as often and, where it orders them, in the order it gives them. `set`: the
    same rows at all."""


class SQLEnv(AskingEnv):
    """The model asks with `<sql>…</sql>` and ends with `<solution>…</solution>`, thinking in `<think>…</think>`.

    -1 for a wrong format, 1 for a query whose result is that of `reward_spec["ground_truth"]`, else 0. The row names
    the database by `data` (synsql, spider or bird) and `db_id`. Databases are only read.

    Raises:
        FileNotFoundError: there is no such database.
    """

    answer_tags = ("<solution>", "</solution>")

    def __init__(self, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        super().__init__(max_turns_of(extras, MAX_TURNS))
        self._settings = settings_of("text2sql", env_config, SQLEnvConfig)
        assert "db_id" in extras, f"db_id field is required: name the database; the row has {sorted(extras)}"
        self.db_id = str(extras["db_id"])
        self.gold_sql = str(ground_truth_of(extras))
        self.db_file = self._folder(extras.get("data")) / self.db_id / f"{self.db_id}.sqlite"
        if not self.db_file.is_file():
            raise FileNotFoundError(
                f"there is no database {self.db_file}; set environment.skyrl_gym.text2sql.db_path to the folder above"
            )
        self.tool_group = SQLCodeExecutorToolGroup(str(self.db_file.parents[1]))
        self.init_tool_groups([self.tool_group])

    def ask(self, action: str) -> tuple[str, dict[str, Any]]:
        """Ask the database."""
        told = (self.db_id, extract_query(action), self.max_turns - self.turns)
        found = self._execute_tool(self.tool_group.get_name(), "sql", told)
        return found, {"tool_group": self.tool_group.get_name(), "tool_name": "sql", "tool_input": told}

    def score(self, replies: list[str]) -> float:
        """Format and result of the solution."""
        return compute_score(conversation_of(replies), self.gold_sql, self.db_file, self._settings.match)

    def _folder(self, data: Any) -> Path:
        if data not in FOLDERS:
            raise NotImplementedError(f"data={data!r} of the row is none of {', '.join(FOLDERS)}")
        return Path(self._settings.db_path) / FOLDERS[data]
