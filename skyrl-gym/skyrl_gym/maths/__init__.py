r"""Extraction and comparison of mathematical answers.

`verify` runs math-verify (`pip install './skyrl-gym[maths]'`) in worker processes. An answer as short as 10^{10^{10}}
keeps a computer algebra system busy forever, and only a process can be killed. POSIX only.
"""

import importlib.util
import math
import os
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_gym.error import InvalidSettings
from skyrl_gym.optional import install_command
from skyrl_gym.tools.calls import strip_thoughts
from skyrl_gym.worker_pool import Pool

MAX_WORKERS = min(8, os.cpu_count() or 1)
TIMEOUT_SECONDS = 5.0
MAX_ANSWER_CHARS = 4096

MINUS_SIGNS = str.maketrans(dict.fromkeys("−–‒‐‑﹣－", "-"))
"""Characters that models use as minus signs, mapped to ASCII."""

_pool = Pool("skyrl_gym.maths", MAX_WORKERS)

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # skips escaped braces
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[-+]?\d)(\S+))")
_MARK = re.compile(r"####|answer\**\s*[:=]", re.IGNORECASE)
_PROSE_MARK = re.compile(r"\banswer\s+is\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.\s|\n|<\|")


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of a reply, e.g. ``Grade("42", True)``.

    answer: the extracted answer, or None if the reply has none.
    is_correct: True if the answer is right. Undecided answers count as wrong.
    undecided: why there is no verdict: it took too long (``timeout``), two workers died (``crash``),
        or the answer is longer than `MAX_ANSWER_CHARS` (``length``). None if there is a verdict.
    """

    answer: str | None
    is_correct: bool
    undecided: Literal["timeout", "crash", "length"] | None = None


Grader = Callable[[str, str], Grade]
"""A function from a reply and the ground truth to a grade."""


def choose_grader(
    env_class: str, env_config: Mapping[str, Any] | None, graders: Mapping[str, Grader], default: str
) -> Grader:
    """Return the grader named by ``env_config["grader"]``, or `default` if unset.

    Raises:
        InvalidSettings: the grader is unknown, or another key is set.
        ModuleNotFoundError: the grader needs math-verify, but it is not installed.
    """
    if unknown := sorted(map(str, set(env_config or {}) - {"grader", "env_class"})):  # SkyRL adds `env_class`
        raise InvalidSettings(f"environment.skyrl_gym.{env_class}.{unknown[0]} is unknown; the only key is grader")
    if (name := (env_config or {}).get("grader")) is None:
        name = default
    key = f"environment.skyrl_gym.{env_class}.grader={name}"
    if not isinstance(name, str) or name not in graders:
        raise InvalidSettings(f"{key} is unknown; use one of {', '.join(graders)}")
    if graders[name] is grade and importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(f"{key} needs math-verify: {install_command('maths')}")
    return graders[name]


def grade(reply: str, ground_truth: str) -> Grade:
    """Grade a reply's `final_answer` with `verify`: any notation of the same number, set or expression is right.
    Thoughts are ignored, including one that was cut off.
    """
    answer = final_answer(strip_thoughts(reply))
    return Grade(None, False) if answer is None else verify(answer, ground_truth)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{…}``, or the number in ``\boxed 42``. The content may contain braces.

    Return None if there is no box, or the last one is not closed.

    >>> last_boxed(r"\boxed{1} or \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    box = _last(_BOX, text)
    if box is None:
        return None
    if box[1] is not None:
        return box[1].rstrip(".,;$")
    start, depth = box.end(), 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : brace.start()]
    return None


def final_answer(text: str) -> str | None:
    r"""Return the last marked answer in `text`, or None if there is none.

    A mark is ``\boxed{…}``, ``#### …`` or ``Answer: …``. Without any of these, the last ``answer is …`` counts.
    An answer without braces ends with the line or the sentence.

    >>> final_answer("So the answer is 42.")
    '42'
    >>> final_answer("Answer: 41\n#### 42")
    '42'
    """
    boxed = last_boxed(text)
    mark = _last(_MARK, text)
    box = _last(_BOX, text)
    if boxed is not None and box is not None and (mark is None or box.start() > mark.start()):
        return boxed.strip() or None
    mark = mark or _last(_PROSE_MARK, text)
    if mark is None:
        return None
    sentence = _SENTENCE_END.split(text[mark.end() :].lstrip(" \t\r\n:*"), maxsplit=1)[0]
    repeated = _last(_PROSE_MARK, sentence)  # "Final Answer: The final answer is 42."
    sentence = sentence[repeated.end() :].lstrip(" :") if repeated is not None else sentence
    return sentence.strip().rstrip(" \t.,*") or None


def verify(answer: str, gold: str, timeout_seconds: float = TIMEOUT_SECONDS) -> Grade:
    r"""Grade `answer` as correct if it is equivalent to `gold`. Thread-safe.

    Both may be LaTeX or plain text. Every answer gets a grade: if there is no verdict after `timeout_seconds`, it is
    wrong and `undecided`. Waiting for a free worker does not count.

    Raises:
        ValueError: math-verify cannot parse `gold`, or the time is not positive.
        RuntimeError: a worker does not start, or `close` was called meanwhile.

    >>> verify(r"\frac12", "0.5").is_correct
    True
    """
    if not 0 < timeout_seconds < math.inf:
        raise ValueError(f"timeout_seconds={timeout_seconds} must be a positive number")
    if len(answer) > MAX_ANSWER_CHARS:
        return Grade(answer, False, "length")
    for _ in range(2):  # a worker may be killed for reasons unrelated to the answer
        try:
            is_correct = _pool.ask([answer, gold, timeout_seconds], timeout_seconds)["is_correct"]
        except TimeoutError:
            return Grade(answer, False, "timeout")
        except ConnectionError:
            continue
        if is_correct is None:
            raise ValueError(f"ground_truth={gold!r} contains nothing that math-verify can parse; fix the row")
        return Grade(answer, is_correct)
    return Grade(answer, False, "crash")


def close() -> None:
    """End all workers, including busy ones. Called at exit. The next `verify` starts new workers."""
    _pool.close()


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)
