"""Single-reply tasks: generated from an id, scored by a program."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal

from skyrl_gym.envs.row import whole_number

Split = Literal["train", "validation"]

VALIDATION_SHARE = 10
"""One in this many distinct tasks is a validation task."""

BLOCK_SIZE = 256
"""Number of ids per block. An unlimited family takes one task of each split from a block."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task, e.g. ``Task(700000012, "sudoku", "Solve this Sudoku …", ground_truth="531…")``.

    task_type: the kind of task, used as the `data_source` of its rows.
    ground_truth: the answer without the format that the prompt asks for. Empty if many answers are right.
    facts: JSON values that the verifier needs.
    """

    task_id: int
    task_type: str
    prompt: str
    ground_truth: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Hash of the prompt, used to check that a row's task is still the same."""
        return hashlib.blake2b(self.prompt.encode(), digest_size=8).hexdigest()


class TaskFamily(ABC):
    """Base class for task families. The same options and id give the same task in every process.

    Tasks with the same identity are in the same split, so no validation task appears in training under a different id.
    """

    env: ClassVar[str]
    """Name of the family in `extra_info["env"]`."""

    def __init__(self) -> None:
        self._cached = lru_cache(maxsize=1000)(self._generate)

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Resolved options as JSON values. A family created from them has the same tasks."""

    @property
    def task_ids(self) -> Sequence[int] | None:
        """All ids of a limited family, or None if ids are unlimited."""
        return None

    def generate(self, task_id: int) -> Task:
        """Return the task with this id. The last 1,000 are cached.

        Raises:
            ValueError: the family has no such id.
        """
        return self._cached(whole_number(task_id, "task_id", at_least=0))

    def identity(self, task_id: int) -> str:
        """Return a string that is equal for equal tasks. The default is the prompt."""
        return self.generate(task_id).prompt

    def split_of(self, task_id: int) -> Split:
        """Return a task's split, which depends only on the task's identity."""
        digest = hashlib.blake2b(self.identity(task_id).encode(), digest_size=8).digest()
        return "validation" if int.from_bytes(digest, "big") % VALIDATION_SHARE == 0 else "train"

    @property
    def n_blocks(self) -> int:
        """Number of blocks of an unlimited family. Each block has one task of either split."""
        return 10_000_000

    def block(self, index: int) -> Sequence[int]:
        """Return the ids that an unlimited family picks task number `index` of either split from."""
        return range(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)

    @abstractmethod
    def _generate(self, task_id: int) -> Task:
        """Generate a task."""

    @abstractmethod
    def solve(self, task: Task) -> str:
        """Return a reply with the highest score, in the format that the prompt asks for."""

    @abstractmethod
    def score(self, reply: str, task: Task) -> float:
        """Return a reply's score, from 0 to 1. Never raises, whatever the text."""
