"""Hostile programs, contained so that they harm nothing even where a limit is broken.

TEST_PROGRAMS=1000 grades a thousand programs at every level, as root and as a user (`make test-isolation`).
"""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any

import pytest
from gym_kit.attacks import ATTACKS
from gym_kit.containment import Identity, identities, problem, run_contained, supported_levels
from gym_kit.hostile_programs import HARMLESS, HOSTILE

from skyrl_gym.isolation.program import Level

N_PROGRAMS = int(os.environ.get("TEST_PROGRAMS", "20"))
SECONDS_PER_PROGRAM = 3.0  # on a busy machine


CASES = [(level, identity) for level in supported_levels() for identity in identities()]


def marks_of(is_nightly: bool) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.nightly,) if is_nightly else ()


MARKED_CASES = [pytest.param(*case, marks=marks_of(case[1] != identities()[0])) for case in CASES]
NOTHING_LEFT: dict[str, Any] = {}


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
    ("level", "identity", "name"),
    [
        pytest.param(level, identity, name, marks=marks_of(identity != identities()[0]))
        for level, identity in CASES
        for name, attack in ATTACKS.items()
        if attack.is_prevented(level, is_root=identity == "root")
    ],
)
def test_attack_does_no_harm(level: Level, identity: Identity, name: str) -> None:
    attack = ATTACKS[name]
    result = report("attacks", level, identity)["attacks"][name]
    assert result["harm"] == {}
    assert "harm" not in result["stdout"], result["stderr"]
    assert result["end"] in attack.ends
    assert result["cpu_seconds"] < 2.0  # the limit is one second
    assert result["peak_bytes"] < 256 << 20  # the limit is 64 MiB, but files are looked at every now and then


@pytest.mark.parametrize(("level", "identity"), MARKED_CASES)
def test_attacks_leave_nothing_behind(level: Level, identity: Identity) -> None:
    assert report("attacks", level, identity)["left"] == NOTHING_LEFT


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("level", supported_levels())
def test_hostile_program_is_contained(level: Level, name: str) -> None:
    result = report("hostile", level, "user")["hostile"][name]
    assert result["end"] in HOSTILE[name][1]
    assert len(result["stdout"]) <= 100_000
    if name not in HARMLESS:
        assert (result["end"], result["status"]) != ("exit", 0)


@pytest.mark.parametrize("level", supported_levels())
def test_hostile_programs_leave_nothing_behind_and_end_with_their_warden(level: Level) -> None:
    result = report("hostile", level, "user")
    assert result["left"] == NOTHING_LEFT
    assert result["orphaned"] in ("lost", "processes")


@pytest.mark.timeout(600 + N_PROGRAMS * SECONDS_PER_PROGRAM)
@pytest.mark.parametrize(
    ("level", "identity"), [pytest.param(*case, marks=marks_of(case != CASES[0])) for case in CASES]
)
def test_many_programs_get_the_right_verdicts(level: Level, identity: Identity) -> None:
    result = report("many", level, identity, N_PROGRAMS)
    assert result["mistakes"] == []
    assert (result["harm"], result["left"]) == ({}, NOTHING_LEFT)
