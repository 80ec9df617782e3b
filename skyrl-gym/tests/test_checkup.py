from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import broken_envs
import pytest
from broken_envs import ROW, GoodEnv, Hangs, LeavesProcesses, LeavesThreads

from skyrl_gym.checkup import RULES, Checkup, Finding
from skyrl_gym.envs import BUILT_IN
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.registration import EnvSpec


@pytest.fixture(autouse=True)
def what_is_left_behind_ends() -> Iterator[None]:
    for released in (LeavesThreads.released, Hangs.released):
        released.clear()
    yield
    for released in (LeavesThreads.released, Hangs.released):
        released.set()
    while LeavesProcesses.left:
        process = LeavesProcesses.left.pop()
        process.kill()
        process.wait()


def findings(cls: type[BaseTextEnv] | str, row: Any = ROW, timeout_seconds: float = 60, **config: Any) -> list[Finding]:
    before = copy.deepcopy(row)
    found = list(Checkup(EnvSpec("mine", cls), row, config, timeout_seconds).run())
    assert row == before
    return found


@pytest.mark.parametrize("cls", [GoodEnv, broken_envs.AsyncEnv, broken_envs.LockEnv, broken_envs.NoMetrics])
def test_an_environment_that_keeps_all_rules(cls: type[BaseTextEnv]) -> None:
    threads = set(threading.enumerate())
    assert findings(cls) == [Finding(rule, "kept") for rule in RULES]
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize(
    ("name", "rule", "verdict", "told"),
    [
        ("NeedsMore", "can be made and begun", "broken", "the constructor raised KeyError: 'map' (broken_"),
        ("Parses", "takes any reply", "broken", "step() raised IndexError: list index out of range (broken_envs.py"),
        ("Parses", "takes any reply", "broken", "for the reply: nothing"),
        ("Leaves", "takes any reply", "broken", "step() raised SystemExit: I am leaving,"),
        ("NoReward", "takes any reply", "broken", "step() returned reward=nan; it must be a finite number"),
        ("ListOfFacts", "takes any reply", "broken", "step() returned metadata=['fact']; it must be a dict"),
        ("PerhapsDone", "takes any reply", "broken", "step() returned what raises ValueError: perhaps (broken_envs.py"),
        ("TalksNumbers", "takes any reply", "broken", "step() returned a message with content=3"),
        ("Alarm", "takes any reply", "broken", "ValueError: signal only works in main thread of"),
        ("Alarm", "takes any reply", "broken", "for the reply: nothing; training makes calls in threads other than"),
        ("OldLoop", "takes any reply", "broken", "RuntimeError: There is no current event loop in thread"),
        ("LoopInLoop", "takes any reply", "broken", "RuntimeError: This event loop is already running (broken_env"),
        ("KeepsItsLoop", "takes any reply", "broken", "step() raised RuntimeError: Event loop is closed"),
        ("StopsTheLoop", "takes any reply", "broken", "it stopped the event loop, in which the trainer and all other"),
        ("OneThread", "takes any reply", "broken", "SQLite objects created in a thread can only be used in that same"),
        ("Endless", "ends by its last turn", "advice", "it was not done after 3 turns"),
        ("Talks", "says nothing when it is done", "advice", "observations with done=True"),
        ("Writes", "leaves its dataset row alone", "broken", "it changed extras"),
        ("Appends", "leaves its dataset row alone", "broken", "it changed the messages that init() was given"),
        ("Shares", "plays beside itself", "broken", "episodes that took turns came out otherwise than alone"),
        ("SharesItsMetrics", "plays beside itself", "broken", "episodes that took turns came out otherwise than alone"),
        ("Races", "plays beside itself", "broken", "whose calls ran at the same time came out otherwise"),
        ("RacesQuickly", "plays beside itself", "broken", "whose calls ran at the same time came out otherwise"),
        ("AsyncRaces", "plays beside itself", "broken", "whose calls ran at the same time came out otherwise"),
        ("OneAtATime", "plays beside itself", "broken", "beside other episodes, with calls at the same time"),
        ("OneAtATime", "plays beside itself", "broken", "step() raised AssertionError: one at a time, please"),
        ("Dice", "plays beside itself", "advice", "side by side came out otherwise than alone: it is random, or"),
        ("Dice", "comes to the same again", "advice", "came out differently"),
        ("BadMetrics", "reports numbers", "broken", "aggregate_metrics() raised ZeroDivisionError"),
        ("OneNumber", "reports numbers", "broken", "aggregate_metrics() returned 3.0; return a dict"),
        ("Lock", "can have a process of its own", "advice", "has no JSON"),
        ("LockAtFirst", "can have a process of its own", "advice", "has no JSON"),
        ("LeavesThreads", "leaves nothing behind", "advice", "three episodes left 3 threads behind"),
        ("LeavesProcesses", "leaves nothing behind", "advice", "three episodes left 3 processes behind"),
        ("CloseTwice", "can be made and begun", "broken", "close() raised AssertionError: closed already"),
    ],
)
def test_what_breaks_a_rule_is_named(name: str, rule: str, verdict: str, told: str) -> None:
    (finding,) = [finding for finding in findings(getattr(broken_envs, name)) if finding.rule == rule]
    assert finding.verdict == verdict
    assert told in finding.told


def test_without_an_environment_nothing_else_is_checked() -> None:
    assert [finding.rule for finding in findings(broken_envs.NeedsMore)] == ["can be made and begun"]


@pytest.mark.parametrize(
    ("name", "where", "rule", "told"),
    [
        ("Hangs", "constructor", "can be made and begun", "the constructor did not come back within 0.2 s. It is in"),
        ("Hangs", "init", "can be made and begun", "init() did not come back within 0.2 s. It is in"),
        ("Hangs", "step", "takes any reply", "step() did not come back within 0.2 s, for the reply: an open tag. It"),
        ("Hangs", "get_metrics", "can be made and begun", "get_metrics() did not come back within 0.2 s. It is in"),
        ("Hangs", "close", "can be made and begun", "close() did not come back within 0.2 s. It is in"),
        ("HangsAwaited", "", "takes any reply", "in answer: await asyncio.Event().wait()"),
        ("BlocksTheLoop", "", "takes any reply", "in step_async: Hangs.released.wait()"),
        ("HangsBesideOthers", "", "plays beside itself", "beside other episodes: step() did not come back within"),
        ("MetricsHang", "", "reports numbers", "aggregate_metrics() did not come back within 0.2 s. It is in"),
    ],
)
def test_a_call_that_hangs_ends_the_check(name: str, where: str, rule: str, told: str) -> None:
    found = findings(getattr(broken_envs, name), timeout_seconds=0.2, where=where)
    assert [finding.verdict for finding in found] == ["kept"] * (len(found) - 1) + ["broken"]
    assert found[-1].rule == rule
    assert told in found[-1].told
    assert "  broken_envs.py, line " in found[-1].told
    assert found[-1].told.endswith("\nThe check ends here: the rules after this one would hang too")


def test_what_does_not_hang_is_not_stuck() -> None:
    checkup = Checkup(EnvSpec("mine", Hangs), ROW, {"where": "nowhere"}, timeout_seconds=5)
    assert {finding.verdict for finding in checkup.run()} == {"kept"}
    assert not checkup.is_stuck


@pytest.mark.parametrize("id", ["gsm8k", "gsm8k_multi_turn", "multiply", "aime"])
def test_ours_keep_all_rules(id: str) -> None:
    assert {finding.verdict for finding in findings(BUILT_IN[id])} == {"kept"}


def test_a_row_may_have_nothing_for_max_turns() -> None:
    assert {finding.verdict for finding in findings(GoodEnv, ROW | {"max_turns": None})} == {"kept"}


def test_env_config_is_passed_on() -> None:
    assert findings(BUILT_IN["gsm8k"], grader="nobody")[0].verdict == "broken"
