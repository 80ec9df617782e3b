from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from checkup import broken_envs
from checkup.broken_envs import ROW, GoodEnv, Hangs, LeavesProcesses, LeavesThreads

from skyrl_gym.checkup.rules import RULES, Checkup, Finding
from skyrl_gym.envs import BUILT_IN
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.registration import EnvSpec


@pytest.fixture(autouse=True)
def release_leaked_resources() -> Iterator[None]:
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
def test_good_environments_pass_all_rules(cls: type[BaseTextEnv]) -> None:
    threads = set(threading.enumerate())
    assert findings(cls) == [Finding(rule, "passed") for rule in RULES]
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize(
    ("name", "rule", "verdict", "message"),
    [
        ("NeedsMap", "can be constructed and initialized", "failed", "the constructor raised KeyError: 'map' (broken_"),
        (
            "ParsesReply",
            "accepts any reply",
            "failed",
            "step() raised IndexError: list index out of range (broken_envs.py",
        ),
        ("ParsesReply", "accepts any reply", "failed", "for the reply: empty text"),
        ("CallsExit", "accepts any reply", "failed", "step() raised SystemExit: I am leaving,"),
        ("NanReward", "accepts any reply", "failed", "step() returned reward=nan; it must be a finite number"),
        ("ListMetadata", "accepts any reply", "failed", "step() returned metadata=['fact']; it must be a dict"),
        (
            "AmbiguousDone",
            "accepts any reply",
            "failed",
            "it must be True or False",
        ),
        ("SendsNumbers", "accepts any reply", "failed", "step() returned a message with content=3"),
        ("SetsSignalHandler", "accepts any reply", "failed", "ValueError: signal only works in main thread of"),
        (
            "SetsSignalHandler",
            "accepts any reply",
            "failed",
            "for the reply: empty text; training makes calls in threads other than",
        ),
        ("ExpectsThreadLoop", "accepts any reply", "failed", "RuntimeError: There is no current event loop in thread"),
        ("NestsLoops", "accepts any reply", "failed", "RuntimeError: This event loop is already running (broken_env"),
        ("LeavesClosedLoop", "accepts any reply", "failed", "step() raised RuntimeError: Event loop is closed"),
        ("StopsLoop", "accepts any reply", "failed", "it stopped the event loop, in which the trainer and all other"),
        (
            "OwnsThread",
            "accepts any reply",
            "failed",
            "SQLite objects created in a thread can only be used in that same",
        ),
        ("Endless", "ends by its last turn", "advice", "it was not done after 3 turns"),
        ("TalksWhenDone", "returns no observations when done", "advice", "observations with done=True"),
        ("ModifiesExtras", "does not modify its dataset row", "failed", "it modified extras"),
        ("ModifiesPrompt", "does not modify its dataset row", "failed", "it modified the messages passed to init()"),
        (
            "SharesCounter",
            "isolates its episodes",
            "failed",
            "interleaved episodes had other results than a single one",
        ),
        (
            "SharesMetrics",
            "isolates its episodes",
            "failed",
            "interleaved episodes had other results than a single one",
        ),
        ("Races", "isolates its episodes", "failed", "episodes with concurrent calls had other results"),
        ("RacesBriefly", "isolates its episodes", "failed", "episodes with concurrent calls had other results"),
        ("AsyncRaces", "isolates its episodes", "failed", "episodes with concurrent calls had other results"),
        ("RefusesConcurrency", "isolates its episodes", "failed", "among other episodes with concurrent calls"),
        (
            "RefusesConcurrency",
            "isolates its episodes",
            "failed",
            "step() raised AssertionError: one at a time, please",
        ),
        ("IsRandom", "isolates its episodes", "advice", "had other results together than alone: they are random, or"),
        ("IsRandom", "is deterministic", "advice", "had different results"),
        ("FailingAggregate", "reports numeric metrics", "failed", "aggregate_metrics() raised ZeroDivisionError"),
        ("NumberAggregate", "reports numeric metrics", "failed", "aggregate_metrics() returned 3.0; return a dict"),
        ("LockInMetadata", "can run in a separate process", "advice", "cannot be written as JSON"),
        ("LockFromInit", "can run in a separate process", "advice", "cannot be written as JSON"),
        ("LeavesThreads", "releases its resources", "advice", "three episodes leaked 3 threads"),
        ("LeavesProcesses", "releases its resources", "advice", "three episodes leaked 3 processes"),
        ("CloseTwice", "can be constructed and initialized", "failed", "close() raised AssertionError: closed already"),
    ],
)
def test_violations_are_reported(name: str, rule: str, verdict: str, message: str) -> None:
    (finding,) = [finding for finding in findings(getattr(broken_envs, name)) if finding.rule == rule]
    assert finding.verdict == verdict
    assert message in finding.detail


def test_check_ends_if_the_environment_cannot_be_constructed() -> None:
    assert [finding.rule for finding in findings(broken_envs.NeedsMap)] == ["can be constructed and initialized"]


@pytest.mark.parametrize(
    ("name", "where", "rule", "message"),
    [
        (
            "Hangs",
            "constructor",
            "can be constructed and initialized",
            "the constructor did not return within 0.2 s. It is in",
        ),
        ("Hangs", "init", "can be constructed and initialized", "init() did not return within 0.2 s. It is in"),
        ("Hangs", "step", "accepts any reply", "step() did not return within 0.2 s, for the reply: unclosed tags. It"),
        (
            "Hangs",
            "get_metrics",
            "can be constructed and initialized",
            "get_metrics() did not return within 0.2 s. It is in",
        ),
        ("Hangs", "close", "can be constructed and initialized", "close() did not return within 0.2 s. It is in"),
        ("HangsAsync", "", "accepts any reply", "in answer: await asyncio.Event().wait()"),
        ("BlocksLoop", "", "accepts any reply", "in step_async: Hangs.released.wait()"),
        ("HangsAmongOthers", "", "isolates its episodes", "among other episodes: step() did not return within"),
        (
            "HangingAggregate",
            "",
            "reports numeric metrics",
            "aggregate_metrics() did not return within 0.2 s. It is in",
        ),
    ],
)
def test_hanging_call_ends_the_check(name: str, where: str, rule: str, message: str) -> None:
    found = findings(getattr(broken_envs, name), timeout_seconds=0.2, where=where)
    assert [finding.verdict for finding in found] == ["passed"] * (len(found) - 1) + ["failed"]
    assert found[-1].rule == rule
    assert message in found[-1].detail
    assert "  broken_envs.py, line " in found[-1].detail
    assert found[-1].detail.endswith("\nThe check ends here: the remaining rules would hang too")


def test_check_without_hangs_is_not_stuck() -> None:
    checkup = Checkup(EnvSpec("mine", Hangs), ROW, {"where": "nowhere"}, timeout_seconds=5)
    assert {finding.verdict for finding in checkup.run()} == {"passed"}
    assert not checkup.is_stuck


@pytest.mark.parametrize("id", ["gsm8k", "gsm8k_multi_turn", "multiply", "aime"])
def test_built_in_environments_pass_all_rules(id: str) -> None:
    assert {finding.verdict for finding in findings(BUILT_IN[id])} == {"passed"}


def test_max_turns_may_be_none() -> None:
    assert {finding.verdict for finding in findings(GoodEnv, ROW | {"max_turns": None})} == {"passed"}


def test_env_config_is_passed_on() -> None:
    assert findings(BUILT_IN["gsm8k"], grader="nobody")[0].verdict == "failed"
