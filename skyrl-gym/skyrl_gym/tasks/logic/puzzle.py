"""A generated puzzle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A puzzle before it gets an id.

    answer: the bare answer, e.g. ``12``. reply: the answer in the format of the prompt, e.g. ``\\boxed{12}``.
    facts: JSON values that the verifier needs besides the answer.
    """

    prompt: str
    answer: str
    reply: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PuzzleType:
    """A task type's generator and its verifier: (answer in the reply, ground truth, facts) → bool."""

    create: Callable[[Random], Puzzle]
    is_correct: Callable[[str, str, Mapping[str, Any]], bool]
