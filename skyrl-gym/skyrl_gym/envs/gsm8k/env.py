"""GSM8K, one reply: 1 for the right answer, else 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym import maths
from skyrl_gym.envs.gsm8k.grading import GRADERS
from skyrl_gym.envs.one_reply_env import OneReplyEnv
from skyrl_gym.envs.row import answer_of


class GSM8kEnv(OneReplyEnv):
    """One word problem, one reply.

    `extras` is the row: ``reward_spec["ground_truth"]`` is the number. `env_config` may choose a `grader`: ``strict``
    (the default) reads ``#### 42``, ``flexible`` the last number of the reply, ``math_verify`` what the reply marks as
    its answer, in any notation. Where math-verify cannot decide upon an answer, `undecided` in the metadata says why.
    It is wrong then, and the metric of that name counts it.

    Raises:
        AssertionError, ValueError: the row has no ground truth, or one of a strange kind; the grader is unknown.
        ModuleNotFoundError: the grader needs a package that is not installed.
    """

    def __init__(self, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        grader = maths.choose_grader("gsm8k", env_config, GRADERS, "strict")
        super().__init__(answer_of(extras), grader)

    def outcome(self, grade: maths.Grade) -> tuple[float, dict[str, Any]]:
        """Reward and metadata of a grade."""
        return float(grade.is_correct), {"parsed_answer": grade.answer}
