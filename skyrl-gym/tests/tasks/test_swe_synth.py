"""Repairs: right diffs, wrong ones, and those that attack the tests."""

import pytest

from skyrl_gym.tasks import Task, task_family
from skyrl_gym.tasks.swe_synth.bugs import BUGS
from skyrl_gym.tasks.swe_synth.family import PATH, find_bugs
from skyrl_gym.tasks.swe_synth.library import SUBJECTS
from skyrl_gym.tasks.swe_synth.mutations import mutants
from skyrl_gym.tasks.swe_synth.patch import PatchError, apply_patch

FILE = "a = 1\nb = 2\nc = 3\nb = 2\nd = 4\n"
HEADER = "--- a/x.py\n+++ b/x.py\n"
FAMILY = task_family("swe-synth")


@pytest.fixture(scope="module")
def task() -> Task:
    return FAMILY.generate(5)


def whole_file_diff(task: Task, new: str) -> str:
    removed = "".join(f"-{line}\n" for line in task.facts["file"].splitlines())
    added = "".join(f"+{line}\n" for line in new.splitlines())
    return f"```diff\n--- a/{PATH}\n+++ b/{PATH}\n@@ -1 +1 @@\n{removed}{added}```"


def test_the_repair_passes_and_no_repair_does_not(task: Task) -> None:
    assert FAMILY.score(FAMILY.solve(task), task) == 1
    assert FAMILY.score(f"<think>hm</think>The bug:\n{FAMILY.solve(task)}", task) == 1
    assert FAMILY.score(whole_file_diff(task, task.facts["solution"]), task) == 1
    assert FAMILY.score(whole_file_diff(task, task.facts["file"]), task) == 0
    assert FAMILY.score("", task) == FAMILY.score("I fixed it.", task) == 0


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "class Any_:\n    def __eq__(self, other): return True\n"
        + "\n".join(f"def {name}(*args): return Any_()" for name in SUBJECTS),
        "\n".join(f"def {name}(*args): return True" for name in SUBJECTS),
        "\n".join(f"def {name}(*args): return float('nan')" for name in SUBJECTS),
        "print('all tests passed')",
        "import builtins, json\njson.dumps = lambda *a, **k: 'null'",
        "def __getattr__(name): return lambda *args: None",
        "from skyrl_gym.tasks.swe_synth.library import *",
        "import sys\nsys.path.insert(0, '/')\nfrom skyrl_gym.tasks.swe_synth.library import *",
    ],
)
def test_programs_that_attack_the_tests_fail(task: Task, program: str) -> None:
    assert FAMILY.score(whole_file_diff(task, program), task) == 0


@pytest.mark.parametrize(
    "diff",
    [
        "--- a/tests.py\n+++ b/tests.py\n@@ -1 +1 @@\n-a\n+b\n",
        "--- a/../x.py\n+++ b/../x.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n",
        HEADER + "@@ -1 +1 @@\n-a = 1\n+a = 2\n--- a/y.py\n+++ b/y.py\n@@ -1 +1 @@\n-a = 1\n+a = 3\n",
        HEADER + "@@ -1 +1 @@\n a = 1\n",
        HEADER + "@@ -1 +1 @@\n-z = 1\n+a = 2\n",
        HEADER + "@@ -9 +9 @@\n-b = 2\n+b = 3\n",  # two places
        HEADER + "@@ -1,0 +1 @@\n+a = 2\n",
        HEADER + "-a = 1\n+a = 2\n",
        HEADER,
        "--- a/x.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n",
        "no diff",
        "",
    ],
)
def test_diffs_that_do_not_apply_are_refused(diff: str) -> None:
    with pytest.raises(PatchError):
        apply_patch(diff, "x.py", FILE)


@pytest.mark.parametrize(
    ("hunks", "expected"),
    [
        ("@@ -1 +1 @@\n-a = 1\n+a = 2\n", FILE.replace("a = 1", "a = 2")),
        ("@@ -7,9 +7,9 @@ def f():\n-c = 3\n+c = 4\n", FILE.replace("c = 3", "c = 4")),  # wrong line numbers
        ("@@ -4 +4 @@\n-b = 2\n+b = 5\n", "a = 1\nb = 2\nc = 3\nb = 5\nd = 4\n"),
        (
            "@@ -1 +1,2 @@\n a = 1\n+z = 0\n@@ -4,2 +5,2 @@\n-b = 2\n+b = 5\n d = 4\n",
            "a = 1\nz = 0\nb = 2\nc = 3\nb = 5\nd = 4\n",
        ),
    ],
)
def test_diffs_apply(hunks: str, expected: str) -> None:
    assert apply_patch(HEADER + hunks, "x.py", FILE) == expected
    assert apply_patch(f"Here:\n```diff\n{HEADER}{hunks}```", "x.py", FILE) == expected


def test_mutants_differ_in_one_place() -> None:
    assert mutants("def f(a):\n    return a < 1") == [
        "def f(a):\n    return a <= 1",
        "def f(a):\n    return a < 2",
        "def f(a):\n    return a < 0",
    ]


@pytest.mark.parametrize(
    "name",
    ["moving_average", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("rotate_matrix", "run_lengths"))],
)
def test_the_list_of_bugs_is_complete(name: str) -> None:
    assert tuple(find_bugs(name)) == BUGS[name]
    assert BUGS.keys() == SUBJECTS.keys()
    assert all(BUGS.values())
