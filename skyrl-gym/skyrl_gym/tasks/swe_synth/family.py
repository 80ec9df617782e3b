"""The task family `swe-synth`: fix the bug in one of a library's three functions with a unified diff.

Hidden tests run in `skyrl_gym.isolation`. They call the functions with JSON arguments and compare the results outside
the sandbox, so a patched file can neither see nor change the expected values.
"""

import ast
import difflib
import inspect
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from random import Random
from typing import Any, ClassVar

from skyrl_gym.envs.options import reject_unknown, set_options
from skyrl_gym.envs.row import whole_number
from skyrl_gym.isolation.program import FunctionCall, ProgramLimits, level_for, run_program
from skyrl_gym.tasks.base import Task, TaskFamily
from skyrl_gym.tasks.replies import visible_answer
from skyrl_gym.tasks.swe_synth.bugs import BUGS
from skyrl_gym.tasks.swe_synth.library import SUBJECTS
from skyrl_gym.tasks.swe_synth.mutations import mutants
from skyrl_gym.tasks.swe_synth.patch import PatchError, apply_patch

PATH = "toolbox.py"
HEADER = "from typing import Any\n"
LIMITS = ProgramLimits(seconds=20, cpu_seconds=5, memory_bytes=256 << 20)
BUG_LIMITS = ProgramLimits(seconds=4, cpu_seconds=0.5, memory_bytes=256 << 20)  # a correct function takes milliseconds
N_FUNCTIONS = 3
N_TESTS = 12
"""Number of tests per function."""


class SweSynthTasks(TaskFamily):
    """Bug fixes in a small library.

    Options: `task_ids`, a list of ids, or `task_id_range`, the first and last id. By default, ids are unlimited.
    """

    env: ClassVar[str] = "swe-synth"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        values = set_options(options)
        reject_unknown(
            values,
            ["task_ids", "task_id_range"],
            "adapter_config of swe-synth, whose bugs depend on the task id alone,",
        )
        if len(values) > 1:
            raise ValueError(f"adapter_config has both task_ids and task_id_range: {values}; set one of them")
        ids: Sequence[int] | None = values.get("task_ids")
        if "task_id_range" in values:
            bounds = [whole_number(bound, "task_id_range", 0) for bound in values["task_id_range"]]
            if len(bounds) != 2 or bounds[0] > bounds[1]:
                raise ValueError(f"task_id_range={bounds} must be the first and the last id, such as [0, 99]")
            ids = range(bounds[0], bounds[1] + 1)
        self._ids = None if ids is None else [whole_number(task_id, "task_ids", 0) for task_id in ids]

    @property
    def options(self) -> dict[str, Any]:
        """The configured ids, if any."""
        return {} if self._ids is None else {"task_ids": self._ids}

    @property
    def task_ids(self) -> Sequence[int] | None:
        """The configured ids."""
        return self._ids

    def identity(self, task_id: int) -> str:
        """Return the function with its bug."""
        rng = Random(f"swe-synth/{task_id}")
        return _draw_bug(rng)[1]

    def _generate(self, task_id: int) -> Task:
        rng = Random(f"swe-synth/{task_id}")
        name, bug = _draw_bug(rng)
        names = [name, *rng.sample([other for other in SUBJECTS if other != name], N_FUNCTIONS - 1)]
        rng.shuffle(names)
        sources = {other: _source(other) for other in names}
        facts = {
            "file": _file({**sources, name: bug}),
            "solution": _file(sources),
            "tests": [[other, arguments] for other in names for arguments in _arguments(other)],
        }
        arguments, expected, found = _first_failure(name, bug)
        call = f"{name}({', '.join(map(repr, arguments))})"
        prompt = (
            f"A function of {PATH} has a bug: {call} {found}, but it should return {expected!r}. Find and repair "
            f"the bug; the functions must do what their docstrings say.\n\n{PATH}:\n\n```python\n{facts['file']}```\n\n"
            f"Reply with one unified diff, in a code block:\n\n```diff\n--- a/{PATH}\n+++ b/{PATH}\n@@ -1,3 +1,3 @@\n"
            " …\n```"
        )
        return Task(task_id, "swe-synth", prompt, "", facts)

    def solve(self, task: Task) -> str:
        """Return the diff that undoes the bug."""
        old, new = (str(task.facts[key]).splitlines(keepends=True) for key in ("file", "solution"))
        diff = "".join(difflib.unified_diff(old, new, f"a/{PATH}", f"b/{PATH}"))
        return f"```diff\n{diff}```"

    def score(self, reply: str, task: Task) -> float:
        """Return 1 if the diff applies and all tests pass, else 0."""
        try:
            program = apply_patch(visible_answer(reply), PATH, task.facts["file"])
        except PatchError:
            return 0.0
        return float(_find_failure(program, task.facts["tests"]) is None)


def _draw_bug(rng: Random) -> tuple[str, str]:
    """Return a function's name, and its source with a bug that fails a test."""
    name = rng.choice(sorted(SUBJECTS))
    return name, rng.choice(_bugs(name))


@lru_cache(maxsize=len(SUBJECTS))
def _bugs(name: str) -> list[str]:
    """Return a function's sources with a bug."""
    sources = mutants(_source(name))
    return [sources[index] for index in BUGS[name]]


def find_bugs(name: str) -> list[int]:
    """Return the indices of mutants that fail a test with a wrong value or an error: an entry of `BUGS`."""
    tests = [[name, arguments] for arguments in _arguments(name)]
    failures = (_find_failure(_file({name: mutant}), tests, BUG_LIMITS) for mutant in mutants(_source(name)))
    return [index for index, failure in enumerate(failures) if failure is not None and failure[1] is not None]


@lru_cache(maxsize=1000)
def _first_failure(name: str, bug: str) -> tuple[list[Any], Any, str]:
    """Return the arguments of the first failing test, the expected value, and the actual outcome."""
    failure = _find_failure(_file({name: bug}), [[name, arguments] for arguments in _arguments(name)])
    assert failure is not None
    index, found = failure
    arguments = _arguments(name)[index]
    assert found is not None
    return arguments, _compute_expected(name, arguments), found


def _find_failure(
    program: str, tests: Sequence[Sequence[Any]], limits: ProgramLimits = LIMITS
) -> tuple[int, str | None] | None:
    """Return the index and outcome of the first failing test, or None if all pass. The outcome is None at a limit."""
    calls = [FunctionCall(name, arguments) for name, arguments in tests]
    with closing(run_program(program, calls, limits, level_for("best"))) as results:
        for index, ((name, arguments), result) in enumerate(zip(tests, results, strict=True)):
            if result.end != "exit":
                return index, None
            if not result.is_success:
                return index, "raises an error"
            try:
                value = result.value
            except (ValueError, RecursionError):
                return index, "returns no JSON value"
            expected = _compute_expected(name, arguments)
            if value != expected or isinstance(value, bool) != isinstance(expected, bool):
                return index, f"returns {value!r}"
    return None


def _compute_expected(name: str, arguments: Sequence[Any]) -> Any:
    return SUBJECTS[name].function(*_copy(arguments))


def _copy(arguments: Sequence[Any]) -> list[Any]:
    return [[*argument] if isinstance(argument, list) else argument for argument in arguments]


@lru_cache(maxsize=len(SUBJECTS))
def _arguments(name: str) -> list[list[Any]]:
    """Return a function's test arguments."""
    rng = Random(f"swe-synth/{name}")
    return [SUBJECTS[name].arguments(rng) for _ in range(N_TESTS)]


@lru_cache(maxsize=len(SUBJECTS))
def _source(name: str) -> str:
    """Return a function's source as `ast.unparse` writes it, to match the mutants."""
    return ast.unparse(ast.parse(inspect.getsource(SUBJECTS[name].function)))


def _file(sources: Mapping[str, str]) -> str:
    return "\n\n".join([HEADER, *(f"{source}\n" for source in sources.values())])
