"""GSM8K, several replies: the model may try until its answer is right or its turns run out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_gym import maths
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.gsm8k.grading import GRADERS
from skyrl_gym.envs.row import read_answer, read_max_turns
from skyrl_gym.metrics import default_aggregate_metrics

MAX_TURNS = 5
FORMAT_REWARD = 0.2

TRY_AGAIN = (
    "Think about your answer once more, step by step. End with your answer so far, in the form '#### ANSWER', "
    "where ANSWER is a number."
)
ANSWER_NOW = "This is your last turn. Give nothing but your final answer, in the form '#### ANSWER'."


class GSM8kMultiTurnEnv(BaseTextEnv):
    """One word problem, up to `max_turns` replies: ``extras["max_turns"]``, else the row's ``extra_info``, else 5.

    A turn has reward 1 for a right answer, which ends the episode, ``0.2 / max_turns`` for a wrong one, and 0 for none.
    So a model that only keeps to the format gets 0.2 in total. The row and `env_config` are those of `GSM8kEnv`.

    Raises the errors of `GSM8kEnv`, and ValueError if `max_turns` is not a positive whole number.
    """

    def __init__(self, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        super().__init__()
        self.ground_truth = read_answer(extras)
        self.max_turns = read_max_turns(extras, MAX_TURNS)
        self._grader = maths.choose_grader("gsm8k_multi_turn", env_config, GRADERS, "strict")
        self._n_undecided = 0
        self._is_done = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Grade the reply, and ask for another one unless it is right or the last."""
        if self._is_done:
            raise RuntimeError(
                f"this episode ended after turn {self.turns}; create a new GSM8kMultiTurnEnv for the next episode"
            )
        self.turns += 1
        grade = self._grader(action, self.ground_truth)
        self._n_undecided += grade.undecided is not None
        self._is_done = grade.is_correct or self.turns >= self.max_turns
        format_reward = 0.0 if grade.answer is None else FORMAT_REWARD / self.max_turns
        return BaseTextEnvStepOutput(
            observations=self._observations(),
            reward=1.0 if grade.is_correct else format_reward,
            done=self._is_done,
            metadata={"parsed_answer": grade.answer, "undecided": grade.undecided},
        )

    def get_metrics(self) -> dict[str, Any]:
        """Return the number of turns and, with ``math_verify``, of answers that it could not decide on."""
        undecided = {"undecided": self._n_undecided} if self._grader is maths.grade else {}
        return {"steps": self.turns} | undecided

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the mean number of turns as `avg_steps`, and the means of the other metrics."""
        means = default_aggregate_metrics(metrics)
        return {"avg_steps" if key == "steps" else key: value for key, value in means.items()}

    def _observations(self) -> ConversationType:
        if self._is_done:
            return []
        is_next_last = self.turns + 1 == self.max_turns
        return [{"role": "user", "content": ANSWER_NOW if is_next_last else TRY_AGAIN}]
