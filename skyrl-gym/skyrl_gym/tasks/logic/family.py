"""The task family `lgc-v2`. A task id is the task type's number times 100,000,000, plus a seed."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Any, ClassVar

from skyrl_gym.envs.options import one_of, reject_unknown, set_options
from skyrl_gym.tasks.base import BLOCK_SIZE, Task, TaskFamily
from skyrl_gym.tasks.logic import boolean_expressions, cryptarithm, dyck, game_of_24, operation, sudoku
from skyrl_gym.tasks.logic.puzzle import Puzzle, PuzzleType
from skyrl_gym.tasks.replies import visible_answer

SEEDS_PER_TYPE = 100_000_000

TYPES = {
    "dyck_language": PuzzleType(dyck.create_completion, dyck.is_whole_sequence),
    "game_of_24": PuzzleType(game_of_24.create, game_of_24.is_correct),
    "operation": PuzzleType(operation.create, operation.is_correct),
    "cryptarithm": PuzzleType(cryptarithm.create, cryptarithm.is_correct),
    "dyck_language2": PuzzleType(dyck.create_prefix, dyck.is_quoted_sequence),
    "boolean_expressions": PuzzleType(boolean_expressions.create, boolean_expressions.is_correct),
    "sudoku": PuzzleType(sudoku.create, sudoku.is_correct),
    "dyck_language_reasoning_errors": PuzzleType(dyck.create_reasoning_errors, dyck.are_steps),
}

FIRST_NUMBER = {
    "dyck_language": 0,
    "game_of_24": 1,
    "operation": 2,
    "cryptarithm": 3,
    "dyck_language2": 4,  # also covers 5: it has twice as many seeds
    "boolean_expressions": 6,
    "sudoku": 7,
    "dyck_language_reasoning_errors": 8,
}
_TYPE_OF = {number: name for name, number in FIRST_NUMBER.items()} | {5: "dyck_language2"}


class LGCV2Tasks(TaskFamily):
    """Eight types of logic puzzles.

    Options: `task_types`, a list of types. The default is all.
    """

    env: ClassVar[str] = "lgc-v2"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        values = set_options(options)
        reject_unknown(values, ["task_types"], "adapter_config of lgc-v2")
        task_types = values.get("task_types") or list(TYPES)
        names: list[str] = [task_types] if isinstance(task_types, str) else list(task_types)
        self.task_types = [one_of(name, "task_types", TYPES) for name in dict.fromkeys(names)]

    @property
    def options(self) -> dict[str, Any]:
        """The task types."""
        return {"task_types": self.task_types}

    @property
    def n_blocks(self) -> int:
        """The blocks of all task types, the same number for each."""
        return len(self.task_types) * (SEEDS_PER_TYPE // BLOCK_SIZE)

    def block(self, index: int) -> Sequence[int]:
        """Return ids of the task type whose turn it is."""
        n_blocks, position = divmod(index, len(self.task_types))
        start = FIRST_NUMBER[self.task_types[position]] * SEEDS_PER_TYPE + n_blocks * BLOCK_SIZE
        return range(start, start + BLOCK_SIZE)

    def _generate(self, task_id: int) -> Task:
        name, puzzle = _puzzle(task_id)
        return Task(task_id, name, puzzle.prompt, puzzle.answer, puzzle.facts)

    def solve(self, task: Task) -> str:
        """Return the answer in the format of the prompt."""
        return _puzzle(task.task_id)[1].reply

    def score(self, reply: str, task: Task) -> float:
        """Return 1 for a right answer, else 0."""
        answer = visible_answer(reply)
        return float(bool(answer) and TYPES[task.task_type].is_correct(answer, task.ground_truth, task.facts))


@lru_cache(maxsize=1000)
def _puzzle(task_id: int) -> tuple[str, Puzzle]:
    """Return an id's task type and puzzle."""
    number, seed = divmod(task_id, SEEDS_PER_TYPE)
    name = _TYPE_OF.get(number)
    if name is None:
        raise ValueError(f"task_id={task_id} has the task type {number}; lgc-v2 has the types 0 to {max(_TYPE_OF)}")
    seed += (number - FIRST_NUMBER[name]) * SEEDS_PER_TYPE
    return name, TYPES[name].create(Random(f"{name}/{seed}"))
