"""GSM8K: one reply, 1 if correct, else 0."""

from collections.abc import Mapping
from typing import Any

from skyrl_gym import maths
from skyrl_gym.envs.gsm8k.grading import GRADERS
from skyrl_gym.envs.row import NO_ROW, read_answer
from skyrl_gym.envs.single_turn_env import SingleTurnEnv


class GSM8kEnv(SingleTurnEnv):
    """One word problem, one reply.

    `extras` is the row: ``reward_spec["ground_truth"]`` is the number. `env_config` may choose a `grader`: ``strict``
    (the default) reads ``#### 42``, ``flexible`` the last number of the reply, ``math_verify`` the marked answer of the
    reply, in any notation. An answer that math-verify cannot decide on counts as wrong. The metadata's `undecided`
    gives the reason, and the metric `undecided` counts such answers.

    Raises:
        AssertionError: the row has no ground truth.
        ValueError: the ground truth is neither text nor a whole number, or the grader is unknown.
        ModuleNotFoundError: the grader needs a package that is not installed.
    """

    validates_rows = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        grader = maths.choose_grader("gsm8k", env_config, GRADERS, "strict")
        super().__init__(read_answer(extras), grader)

    def score(self, grade: maths.Grade) -> tuple[float, dict[str, Any]]:
        """Return 1 for a right answer, else 0, and the parsed answer."""
        return float(grade.is_correct), {"parsed_answer": grade.answer}
