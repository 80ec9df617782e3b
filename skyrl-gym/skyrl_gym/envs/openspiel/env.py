"""Single moves in OpenSpiel games, rewarded for being legal or for their outcome."""

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.openspiel.answers import ParsedAnswer, parse_answer
from skyrl_gym.envs.openspiel.rewards import move_value
from skyrl_gym.envs.openspiel.tasks import TASK_OPTIONS, TaskConfig, read_task
from skyrl_gym.envs.options import row_options, set_options
from skyrl_gym.envs.row import read_extra_info

MAX_LOGGED_ANSWER = 200
"""Maximum number of characters of an answer in `metadata`."""


class OpenSpielEnv(BaseTextEnv):
    """One turn: the model names a move and gets a reward from 0 to 1.

    `extras` is a row of `OpenSpielTasks.rows`: `extra_info` has the position, as `serialized_game_and_state` or as a
    `task_id` of the configured tasks. `reward_spec.method` may name the reward mode. `env_config` has the fields of
    `TaskConfig` and takes precedence over the row.

    An answer without a legal move has reward 0. In mode ``outcome`` the reward of a legal move is the mean result of
    `n_playouts` random games after it. These games depend only on the task and the move.

    Raises:
        ImportError: OpenSpiel is not installed.
        ValueError: the row or the configuration is invalid. The message names the value.
    """

    validates_rows = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        extras = extras or {}
        method = (extras.get("reward_spec") or {}).get("method")
        mode = {} if method in (None, "", "rule") else {"reward_mode": method}
        options = mode | row_options(extras, TASK_OPTIONS)
        self.config = TaskConfig.from_options(options | set_options(env_config))
        self.task = read_task(read_extra_info(extras), self.config)
        self.parsed: ParsedAnswer | None = None
        self.value: float | None = None

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score the move that the reply names."""
        if self.parsed is not None:
            raise RuntimeError("this task has been answered; create a new OpenSpielEnv for the next episode")
        self.turns += 1
        self.parsed = parse_answer(action, self.task.legal)
        is_legal = self.parsed.move is not None
        if self.config.reward_mode == "outcome":
            self.value = self._outcome()
        reward = float(is_legal) if self.value is None else self.value
        return BaseTextEnvStepOutput(
            observations=[],
            reward=reward,
            done=True,
            metadata={
                "reward_components": {self.config.reward_mode: reward},
                "legal": is_legal,
                "outcome": self.value,
                **describe(self.parsed),
            },
        )

    def get_metrics(self) -> dict[str, Any]:
        """Return 1 if the answer was a legal move, and its outcome. Empty before the answer."""
        if self.parsed is None:
            return {}
        metrics: dict[str, Any] = {"legal": int(self.parsed.move is not None)}
        return metrics if self.value is None else metrics | {"outcome": self.value}

    def _outcome(self) -> float:
        if self.parsed is None or self.parsed.move is None:
            return 0.0
        task = self.task
        seed = f"{self.config.seed}/{task.task_id}"
        return move_value(task.state, task.player, self.parsed.move.action, self.config.n_playouts, seed)


def describe(parsed: ParsedAnswer) -> dict[str, Any]:
    """Describe a parsed answer for `metadata`: the move and its id, or None, and how it was found."""
    return {
        "action": parsed.move and parsed.move.action,
        "move": parsed.move and parsed.move.text,
        "parsed_by": parsed.way,
        "answer": parsed.answer[:MAX_LOGGED_ANSWER],
    }
