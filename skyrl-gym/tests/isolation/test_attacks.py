"""Hostile programs, contained so that they harm nothing even where a limit is broken.

TEST_PROGRAMS=1000 grades a thousand programs at every level, as root and as a user (`make test-isolation`).
"""

import json
import os
from functools import cache
from typing import Any

import pytest
from gym_kit.attacked_trainer import attacks_by_task
from gym_kit.attacks import ATTACKS, HOSTILE
from gym_kit.containment import Identity, identities, problem, run_contained, supported_levels

from skyrl_gym.isolation.program import Level

N_PROGRAMS = int(os.environ.get("TEST_PROGRAMS", "8"))
SECONDS_PER_PROGRAM = 3.0  # on a busy machine


CASES = [(level, identity) for level in supported_levels() for identity in identities()]


def nightly_if(condition: bool) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.nightly,) if condition else ()


@cache
def report(task: str, level: Level, identity: Identity, n_programs: int = 0) -> dict[str, Any]:
    """Return what a trainer reports that runs hostile programs."""
    if problem() is not None:
        pytest.skip(f"hostile programs cannot be contained on this machine: {problem()}")
    seconds = 280.0 + n_programs * SECONDS_PER_PROGRAM
    output = run_contained("gym_kit.attacked_trainer", task, level, str(n_programs), identity=identity, seconds=seconds)
    result: dict[str, Any] = json.loads(output)
    if result["problem"]:
        pytest.skip(f"as {identity}: {result['problem']}")
    return result


@pytest.mark.parametrize(
    ("level", "identity", "task", "name"),
    [
        pytest.param(
            *(level, identity, task, name), marks=nightly_if(identity != identities()[0] or task == "repeated")
        )
        for level, identity in CASES
        for task, names in attacks_by_task(level, identity == "root").items()
        for name in names
    ],
)
def test_attack_does_no_harm(level: Level, identity: Identity, task: str, name: str) -> None:
    attack = ATTACKS[name]
    result = report(task, level, identity)["attacks"][name]
    assert result["harm"] == {}
    assert "harm" not in result["stdout"], result["stderr"]
    assert result["end"] in attack.ends.split()
    assert result["cpu_seconds"] < attack.cpu_seconds + 1.0
    assert result["peak_bytes"] < 256 << 20  # the limit is 64 MiB, but files are looked at every now and then


@pytest.mark.parametrize(
    ("level", "identity"), [pytest.param(*case, marks=nightly_if(case[1] != identities()[0])) for case in CASES]
)
def test_attacks_leave_nothing_behind(level: Level, identity: Identity) -> None:
    assert report("attacks", level, identity)["left"] == {}


HOSTILE_LEVELS = [pytest.param(level, marks=nightly_if(level != "limits")) for level in supported_levels()]
"""At the lowest level, where the kernel does not end a program's processes, our own code must."""


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("level", HOSTILE_LEVELS)
def test_hostile_program_is_contained(level: Level, name: str) -> None:
    result = report("hostile", level, "user")["hostile"][name]
    assert result["end"] in HOSTILE[name]["ends"].split()
    assert len(result["stdout"]) <= 100_000
    if not HOSTILE[name].get("may_succeed"):
        assert (result["end"], result["status"]) != ("exit", 0)


@pytest.mark.parametrize("level", HOSTILE_LEVELS)
def test_hostile_programs_leave_nothing_behind_and_end_with_their_warden(level: Level) -> None:
    result = report("hostile", level, "user")
    assert result["left"] == {}
    assert result["orphaned"] in ("lost", "processes")


@pytest.mark.timeout(600 + N_PROGRAMS * SECONDS_PER_PROGRAM)
@pytest.mark.parametrize(
    ("level", "identity"), [pytest.param(*case, marks=nightly_if(case != CASES[0])) for case in CASES]
)
def test_many_programs_get_the_right_verdicts(level: Level, identity: Identity) -> None:
    result = report("many", level, identity, N_PROGRAMS)
    assert result["mistakes"] == []
    assert (result["harm"], result["left"]) == ({}, {})
