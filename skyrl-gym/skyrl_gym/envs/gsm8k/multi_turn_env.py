"""GSM8K with retries: the model tries until its answer is right or it runs out of turns."""

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_gym import maths
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.gsm8k.grading import GRADERS
from skyrl_gym.envs.row import NO_ROW, read_answer, read_max_turns
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

    A right answer earns 1 and ends the episode. A wrong answer on the last turn earns 0.2. All other turns earn 0,
    including wrong attempts before the right one. The row and `env_config` are as in `GSM8kEnv`. A subclass may
    override `_parse_action`, `_is_done` and `_get_reward`.

    Raises the same errors as `GSM8kEnv`, and ValueError if `max_turns` is not a positive whole number.
    """

    validates_rows = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        super().__init__()
        self.ground_truth = read_answer(extras)
        self.max_turns = read_max_turns(extras, MAX_TURNS)
        self._grader = maths.choose_grader("gsm8k_multi_turn", env_config, GRADERS, "strict")
        self._n_undecided = 0
        self._grade = maths.Grade(None, False)
        self._has_ended = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Grade the reply, and ask for a new attempt unless it is right or the last."""
        if self._has_ended:
            raise RuntimeError(
                f"this episode ended after turn {self.turns}; create a new GSM8kMultiTurnEnv for the next episode"
            )
        self.turns += 1
        self._grade = maths.Grade(None, False)
        answer = self._parse_action(action)
        if answer != self._grade.answer:  # a subclass has replaced the parser
            self._grade = maths.Grade(answer, answer is not None and answer.strip() == self.ground_truth)
        self._has_ended = self._is_done(action)
        request = ANSWER_NOW if self.turns + 1 == self.max_turns else TRY_AGAIN
        return BaseTextEnvStepOutput(
            observations=[] if self._has_ended else [{"role": "user", "content": request}],
            reward=self._get_reward(action, self._has_ended),
            done=self._has_ended,
            metadata={"parsed_answer": answer, "undecided": self._grade.undecided},
        )

    def _parse_action(self, action: str) -> str | None:
        """Grade the reply and return its answer, or None if it has none."""
        self._grade = self._grader(action, self.ground_truth)
        self._n_undecided += self._grade.undecided is not None
        return self._grade.answer

    def _is_done(self, action: str) -> bool:
        """Return True if the answer is right, or no turns are left."""
        return self._grade.is_correct or self.turns >= self.max_turns

    def _get_reward(self, action: str, done: bool) -> float:
        """Return the reward of this turn."""
        if self._grade.is_correct:
            return 1.0
        return FORMAT_REWARD if done and self._grade.answer is not None else 0.0

    def get_metrics(self) -> dict[str, Any]:
        """Return the number of turns and, with ``math_verify``, of answers it could not decide on."""
        undecided = {"undecided": self._n_undecided} if self._grader is maths.grade else {}
        return {"steps": self.turns} | undecided

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the mean number of turns as `avg_steps`, and the means of the other metrics."""
        means = default_aggregate_metrics(metrics)
        return {"avg_steps" if key == "steps" else key: value for key, value in means.items()}
