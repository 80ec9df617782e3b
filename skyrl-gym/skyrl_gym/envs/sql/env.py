"""A question to a database: look around in it, then give the query that answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
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

    def __post_init__(self) -> None:
        if self.match not in ("exact", "set"):
            raise ValueError(f"environment.skyrl_gym.text2sql.match={self.match!r} is unknown; use exact or set")


class SQLEnv(BaseTextEnv):
    """The model asks with `<sql>…</sql>` and ends with `<solution>…</solution>`, thinking in `<think>…</think>`.

    -1 for a wrong format, 1 for a query whose result is that of `reward_spec["ground_truth"]`, else 0. The row names
    the database by `data` (synsql, spider or bird) and `db_id`. Databases are only read.

    Raises:
        FileNotFoundError: there is no such database.
    """

    def __init__(self, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        super().__init__()
        self._settings = settings_of("text2sql", env_config, SQLEnvConfig)
        assert "db_id" in extras, f"db_id field is required: name the database; the row has {sorted(extras)}"
        self.db_id = str(extras["db_id"])
        self.gold_sql = str(ground_truth_of(extras))
        self.max_turns = max_turns_of(extras, MAX_TURNS)
        self.db_file = self._folder(extras.get("data")) / self.db_id / f"{self.db_id}.sqlite"
        if not self.db_file.is_file():
            raise FileNotFoundError(
                f"there is no database {self.db_file}; set environment.skyrl_gym.text2sql.db_path to the folder above"
            )
        self.chat_history: ConversationType = []
        self.tool_group = SQLCodeExecutorToolGroup(str(self.db_file.parents[1]))
        self.init_tool_groups([self.tool_group])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Ask the database, or score the solution."""
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        if self.turns >= self.max_turns or ("<solution>" in action and "</solution>" in action):
            return BaseTextEnvStepOutput(observations=[], reward=self._score(), done=True, metadata={})
        told = (self.db_id, extract_query(action), self.max_turns - self.turns)
        found = self._execute_tool(self.tool_group.get_name(), "sql", told)
        message = {"role": "user", "content": found}
        self.chat_history.append(message)
        metadata = {"tool_group": self.tool_group.get_name(), "tool_name": "sql", "tool_input": told}
        return BaseTextEnvStepOutput(observations=[message], reward=0.0, done=False, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Turns."""
        return {"steps": self.turns}

    def _folder(self, data: Any) -> Path:
        if data not in FOLDERS:
            raise NotImplementedError(f"data={data!r} of the row is none of {', '.join(FOLDERS)}")
        return Path(self._settings.db_path) / FOLDERS[data]

    def _score(self) -> float:
        said = [message["content"] for message in self.chat_history if message["role"] == "assistant"]
        return compute_score(conversation_of(said), self.gold_sql, self.db_file, self._settings.match)
