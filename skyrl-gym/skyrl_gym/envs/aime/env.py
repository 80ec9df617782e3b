"""AIME and DAPO's training set: one reply, +1 if correct, else -1."""

from collections.abc import Mapping
from typing import Any

from skyrl_gym import maths
from skyrl_gym.envs.aime.grading import GRADERS, to_reward
from skyrl_gym.envs.row import NO_ROW, read_answer
from skyrl_gym.envs.single_turn_env import SingleTurnEnv


class AIMEEnv(SingleTurnEnv):
    r"""One competition problem, one reply.

    `extras` is a row of DAPO's dataset: ``reward_model["ground_truth"]`` is the answer. Rows may use `reward_spec`
    instead of `reward_model`. `env_config` may choose a `grader`: ``minerva`` (the default) reads the last ``Answer:
    …``, ``strict_box`` the last ``\boxed{…}`` verbatim, ``math_verify`` the marked answer of the reply, in any
    notation. `metadata` has `acc`, `pred` and `undecided`. If math-verify cannot decide on an answer, the answer counts
    as wrong, `undecided` gives the reason, and the metric `undecided` counts it.

    Raises:
        AssertionError: the row has no ground truth.
        ValueError: the ground truth is neither text nor a whole number, or the grader is unknown.
        ModuleNotFoundError: the grader needs a package that is not installed.
    """

    validates_rows = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        grader = maths.choose_grader("aime", env_config, GRADERS, "minerva")
        super().__init__(read_answer(extras, ("reward_model", "reward_spec")), grader)

    def score(self, grade: maths.Grade) -> tuple[float, dict[str, Any]]:
        """Return +1 for a right answer, else -1, and the parsed answer."""
        return to_reward(grade), {"acc": grade.is_correct, "pred": grade.answer}
