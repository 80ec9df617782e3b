"""AIME and DAPO's training set, one reply: +1 for the right answer, else -1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym import maths
from skyrl_gym.envs.aime.grading import GRADERS, reward_of
from skyrl_gym.envs.one_reply_env import OneReplyEnv
from skyrl_gym.envs.row import answer_of


class AIMEEnv(OneReplyEnv):
    r"""One competition problem, one reply.

    `extras` is the row, as DAPO's data set has it: ``reward_model["ground_truth"]`` is the answer; a row without
    `reward_model` may have `reward_spec` instead. `env_config` may choose a `grader`: ``minerva`` (the default) reads
    the last ``Answer: …``, ``strict_box`` the last ``\boxed{…}`` to the letter, ``math_verify`` what the reply marks as
    its answer, in any notation. `metadata` has `acc`, `pred` and `undecided`, which says why math-verify could not
    decide upon an answer. It is wrong then, and the metric of that name counts it.

    Raises:
        AssertionError, ValueError: the row has no ground truth, or one of a strange kind; the grader is unknown.
        ModuleNotFoundError: the grader needs a package that is not installed.
    """

    def __init__(self, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        grader = maths.choose_grader("aime", env_config, GRADERS, "minerva")
        super().__init__(answer_of(extras, ("reward_model", "reward_spec")), grader)

    def outcome(self, grade: maths.Grade) -> tuple[float, dict[str, Any]]:
        """Reward and metadata of a grade."""
        return reward_of(grade), {"acc": grade.is_correct, "pred": grade.answer}
