"""One question, one reply, one final answer: a mathematical expression, or the letter of a choice."""

import re
from collections.abc import Mapping
from typing import Any

from skyrl_gym import maths
from skyrl_gym.envs.row import NO_ROW, read_answer
from skyrl_gym.envs.single_turn_env import SingleTurnEnv
from skyrl_gym.error import InvalidSettings
from skyrl_gym.tools.calls import strip_thoughts

_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}|[$*\s]+")
_LETTER = re.compile(r"\(?([A-Za-z])(?:\)|[.:)](?!\s*(?:(?:or|and)\b|[,/&])).*)?", re.DOTALL)
_SENTENCE = re.compile(r"(?i:answer(?:\s+is|\s*:))[\s*$(]*([A-Z])(?![A-Za-z])(?!\)?\s*(?:or|and|,|/)\s*\(?[A-Z]\b)")


def grade_choice(reply: str, ground_truth: str) -> maths.Grade:
    r"""Grade the letter in the last ``\boxed{…}``. Without a box, grade the last ``answer is X`` or ``answer: X``.

    A box with several letters has no answer.

    >>> grade_choice(r"So it is \boxed{\text{C}}.", "C")
    Grade(answer='C', is_correct=True, undecided=None)
    >>> grade_choice(r"\boxed{A or C}", "C").answer is None
    True
    """
    text = strip_thoughts(reply)
    boxed = maths.last_boxed(text)
    if boxed is None:
        *_, letter = [None, *_SENTENCE.findall(text)]
    else:
        found = _LETTER.fullmatch(_WRAPPED.sub(lambda part: part[1] or " ", boxed).strip())
        letter = found and found[1].upper()
    return maths.Grade(letter, letter == ground_truth)


GRADERS: Mapping[str, maths.Grader] = {"math": maths.grade, "choice": grade_choice}


class AnswerEnv(SingleTurnEnv):
    r"""A question whose final answer is graded: 1 if it is right, else 0.

    ``reward_spec["ground_truth"]`` is the answer, and ``reward_spec["method"]`` is ``math``, for expressions in any
    notation, or ``choice``, for the letter of a choice. Prompts should ask for the answer in ``\boxed{…}``. `metadata`
    has `pred`. If math-verify cannot decide, the answer counts as wrong, and the metric `undecided` counts it.

    Raises:
        AssertionError: the row has no ground truth.
        ValueError: the method is unknown, or does not fit the ground truth.
        InvalidSettings: the environment got settings.
        ModuleNotFoundError: math-verify is needed and not installed.
    """

    validates_rows = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        if unknown := sorted(set(env_config or {}) - {"env_class"}):  # SkyRL adds `env_class`
            raise InvalidSettings(f"environment.skyrl_gym.answer.{unknown[0]} is unknown; answer has no settings")
        truth = read_answer(extras)
        method = extras["reward_spec"].get("method")
        if method not in GRADERS:
            raise ValueError(f"reward_spec.method={method!r} must be one of {', '.join(GRADERS)}")
        if method == "choice" and not re.fullmatch("[A-Z]", truth):
            raise ValueError(f"reward_spec.ground_truth={truth!r} must be a letter from A to Z, because method=choice")
        super().__init__(truth, maths.choose_grader("answer", None, GRADERS, method))

    def score(self, grade: maths.Grade) -> tuple[float, dict[str, Any]]:
        """Return 1 for a right answer, else 0, and the parsed answer."""
        return float(grade.is_correct), {"pred": grade.answer}
