"""Each test has environments that break one rule, beside the finding that must report it."""

import asyncio
import copy
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partialmethod
from typing import Any

import pytest
from gym_kit.environments import ROW, GoodEnv
from gym_kit.messages import user
from gym_kit.processes import no_leaks

from skyrl_gym.checkup.rules import RULES, Checkup, Finding, Verdict
from skyrl_gym.envs import BUILT_IN
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.registration import EnvSpec

FIRST_RULE = "can be constructed and initialized"
ANY_REPLY = "accepts any reply"
ISOLATION = "isolates its episodes"
Step = Callable[[GoodEnv, str], Any]
released = threading.Event()
"""Set after each test, so that hanging calls return."""


@pytest.fixture(autouse=True)
def release_hanging_calls() -> Iterator[None]:
    released.clear()
    with no_leaks():
        yield
        released.set()


def find(cls: type[BaseTextEnv] | str, row: Any = ROW, timeout_seconds: float = 60.0, **config: Any) -> list[Finding]:
    before = copy.deepcopy(row)
    findings = list(Checkup(EnvSpec("mine", cls), row, config, timeout_seconds).run())
    assert row == before
    return findings


def check_finding(cls: type[BaseTextEnv], rule: str, message: str, verdict: Verdict = "failed") -> None:
    """Check that the finding of a rule has this verdict, and a detail that contains the message."""
    (finding,) = [finding for finding in find(cls) if finding.rule == rule]
    assert finding.verdict == verdict
    assert message in finding.detail


def env_with(step: Step | None = None, **methods: Any) -> type[GoodEnv]:
    """Return `GoodEnv` with other methods."""
    return type("Broken", (GoodEnv,), methods | ({} if step is None else {"step": step}))


def env_returning(**output: Any) -> type[GoodEnv]:
    """Return `GoodEnv` with other fields in the output of each step."""
    return env_with(lambda self, action: GoodEnv.step(self, action) | output)


# -- environments that keep every rule


class AsyncEnv(GoodEnv):
    async def step_async(self, action: str) -> Any:
        await asyncio.sleep(0)
        return super().step(action)

    def step(self, action: str) -> Any:
        raise AssertionError("step_async comes first")


class LockEnv(GoodEnv):
    """Changes shared state while it holds a lock; runs a new event loop in each call."""

    lock = threading.Lock()
    reply = ""

    def step(self, action: str) -> Any:
        with LockEnv.lock:
            LockEnv.reply = action
            asyncio.run(asyncio.sleep(0.001))
            return super().step(LockEnv.reply)


def divide_by_zero(metrics: Any) -> Any:
    return sum(episode["steps"] for episode in metrics) / 0


NoMetrics = env_with(get_metrics=lambda self: {}, aggregate_metrics=staticmethod(divide_by_zero))  # never called


@pytest.mark.parametrize("cls", [GoodEnv, AsyncEnv, LockEnv, NoMetrics])
def test_good_environments_pass_all_rules(cls: type[BaseTextEnv]) -> None:
    checkup = Checkup(EnvSpec("mine", cls), ROW)
    assert list(checkup.run()) == [Finding(rule, "passed") for rule in RULES]
    assert not checkup.is_stuck


@pytest.mark.parametrize(
    ("id", "max_turns"), [("gsm8k", 3), ("gsm8k_multi_turn", None), ("multiply", 3), ("aime", None)]
)
def test_built_in_environments_pass_all_rules(id: str, max_turns: int | None) -> None:
    assert {finding.verdict for finding in find(BUILT_IN[id], ROW | {"max_turns": max_turns})} == {"passed"}


def test_check_ends_if_the_environment_cannot_be_constructed() -> None:
    def need_map(self: GoodEnv, env_config: Any, extras: dict[str, Any]) -> None:
        extras["map"]

    (finding,) = find(env_with(__init__=need_map))
    assert (finding.rule, finding.verdict) == (FIRST_RULE, "failed")
    assert "the constructor raised KeyError: 'map' (test_rules.py, line " in finding.detail
    assert find(BUILT_IN["gsm8k"], grader="nobody")[0].verdict == "failed"


class Ambiguous:
    def __bool__(self) -> bool:
        raise ValueError("perhaps")


def leave_a_closed_loop(self: GoodEnv, action: str) -> Any:
    try:
        loop = asyncio.get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    return GoodEnv.step(self, action)


async def nest_loops(self: GoodEnv, action: str) -> None:
    loop = asyncio.get_running_loop()
    loop.run_until_complete(loop.create_future())


async def stop_the_loop(self: GoodEnv, action: str) -> Any:
    asyncio.get_running_loop().stop()
    return GoodEnv.step(self, action)


shared = {"steps": 0}
"""State of all instances."""


def reset_shared(self: GoodEnv, prompt: Any) -> Any:
    shared["steps"] = 0
    return prompt, {}


def count_shared(self: GoodEnv, action: str) -> Any:
    shared["steps"] += 1
    return GoodEnv.step(self, action)


def reward_shared(self: GoodEnv, action: str) -> Any:
    return count_shared(self, action) | {"reward": shared["steps"]}


latest_reply = ""


def race(self: GoodEnv, action: str, pause_s: float = 0.0) -> Any:
    """Use the latest reply of all instances."""
    global latest_reply
    latest_reply = action
    if pause_s:
        time.sleep(pause_s)
    return GoodEnv.step(self, latest_reply)


async def race_async(self: GoodEnv, action: str) -> Any:
    global latest_reply
    latest_reply = action
    await asyncio.sleep(0.01)
    return GoodEnv.step(self, latest_reply)


class RefusesConcurrency(GoodEnv):
    free = threading.Lock()

    def step(self, action: str) -> Any:
        assert RefusesConcurrency.free.acquire(blocking=False), "one at a time, please"
        time.sleep(0.01)
        RefusesConcurrency.free.release()
        return super().step(action)


def close_once(self: Any) -> None:
    assert not hasattr(self, "is_closed"), "closed already"
    self.is_closed = True


def open_database(self: Any, prompt: Any) -> Any:
    self.database = sqlite3.connect(":memory:")
    return prompt, {}


def modify_extras(self: GoodEnv, env_config: Any, extras: dict[str, Any]) -> None:
    GoodEnv.__init__(self, env_config, extras)
    extras["seen"] = True


def modify_prompt(self: GoodEnv, prompt: Any) -> Any:
    prompt.extend(user("Think!"))
    return prompt, {}


def draw_reward(self: GoodEnv, action: str) -> Any:
    return GoodEnv.step(self, action) | {"reward": random.random()}


LAST_TURN, NO_NEWS = "ends by its last turn", "returns no observations when done"
ROW_RULE, METRICS, JSON = "does not modify its dataset row", "reports numeric metrics", "can run in a separate process"
LOCK = threading.Lock()
SIGNALS = env_with(lambda self, reply: signal.signal(14, signal.SIG_DFL))
SPLITS = env_with(lambda self, reply: reply.split()[-1])
BROKEN: list[tuple[type[GoodEnv], str, str]] = [
    (env_with(close=close_once), FIRST_RULE, "close() raised AssertionError: closed already"),
    (env_with(close=close_once), FIRST_RULE, ", the second time"),
    (env_returning(reward=float("nan")), ANY_REPLY, "step() returned reward=nan; it must be a finite number"),
    (env_returning(metadata=["fact"]), ANY_REPLY, "step() returned metadata=['fact']; it must be a dict"),
    (env_returning(done=Ambiguous()), ANY_REPLY, "it must be True or False"),
    (env_returning(observations=[{"role": "user", "content": 3}]), ANY_REPLY, "returned a message with content=3"),
    (SPLITS, ANY_REPLY, "step() raised IndexError: list index out of range (test_rules.py"),
    (SPLITS, ANY_REPLY, "for the reply: empty text"),
    (env_with(lambda self, reply: sys.exit("I am leaving")), ANY_REPLY, "step() raised SystemExit: I am leaving"),
    (env_with(lambda self, reply: asyncio.get_event_loop()), ANY_REPLY, "There is no current event loop in thread"),
    (SIGNALS, ANY_REPLY, "ValueError: signal only works in main thread of"),
    (SIGNALS, ANY_REPLY, "; training makes calls in threads other than the main"),
    (env_with(leave_a_closed_loop), ANY_REPLY, "step() raised RuntimeError: Event loop is closed"),
    (env_with(step_async=nest_loops), ANY_REPLY, "RuntimeError: This event loop is already running (test_rules.py"),
    (env_with(step_async=stop_the_loop), ANY_REPLY, "it stopped the event loop, in which the trainer and all other"),
    (
        env_with(lambda self, action: self.database.execute("SELECT 1"), init=open_database),
        ANY_REPLY,
        "SQLite objects created in a thread can only be used in that same",
    ),
    (env_with(__init__=modify_extras), ROW_RULE, "it modified extras"),
    (env_with(init=modify_prompt), ROW_RULE, "it modified the messages passed to init()"),
    (
        env_with(reward_shared, init=reset_shared),
        ISOLATION,
        "interleaved episodes had different results than a single one",
    ),
    (
        env_with(count_shared, init=reset_shared, get_metrics=lambda self: shared),
        ISOLATION,
        "interleaved episodes had different results than a single one",
    ),
    (env_with(race), ISOLATION, "episodes with concurrent calls had different results"),
    (env_with(partialmethod(race, pause_s=0.01)), ISOLATION, "episodes with concurrent calls had different results"),
    (env_with(step_async=race_async), ISOLATION, "episodes with concurrent calls had different results"),
    (RefusesConcurrency, ISOLATION, "among other episodes with concurrent calls"),
    (RefusesConcurrency, ISOLATION, "step() raised AssertionError: one at a time, please"),
    (env_with(aggregate_metrics=staticmethod(divide_by_zero)), METRICS, "aggregate_metrics() raised ZeroDivisionError"),
    (
        env_with(aggregate_metrics=staticmethod(lambda metrics: 3.0)),
        METRICS,
        "aggregate_metrics() returned 3.0; return a dict",
    ),
]
ADVISED: list[tuple[type[GoodEnv], str, str]] = [
    (env_returning(done=False), LAST_TURN, "it was not done after 3 turns"),
    (env_returning(observations=user("Bye.")), NO_NEWS, "observations with done=True"),
    (env_with(draw_reward), ISOLATION, "had different results together than alone: they are random, or"),
    (env_with(draw_reward), "is deterministic", "had different results"),
    (env_returning(metadata={"lock": LOCK}), JSON, "cannot be written as JSON"),
    (env_with(init=lambda self, prompt: (prompt, {"lock": LOCK})), JSON, "cannot be written as JSON"),
]


@pytest.mark.parametrize(
    ("cls", "rule", "message", "verdict"),
    [*((*case, "failed") for case in BROKEN), *((*case, "advice") for case in ADVISED)],
)
def test_broken_rule_is_reported(cls: type[GoodEnv], rule: str, message: str, verdict: Verdict) -> None:
    check_finding(cls, rule, message, verdict)


def test_leaked_threads_and_processes_get_advice() -> None:
    processes: list[subprocess.Popen[bytes]] = []
    files: list[int] = []

    def leave_a_thread(self: GoodEnv, prompt: Any) -> Any:
        threading.Thread(target=released.wait).start()
        return prompt, {}

    def leave_a_process(self: GoodEnv, prompt: Any) -> Any:
        processes.append(subprocess.Popen(["sleep", "600"]))
        return prompt, {}

    def leave_a_file(self: GoodEnv, prompt: Any) -> Any:
        files.append(os.open(os.devnull, os.O_RDONLY))
        return prompt, {}

    cases = ((leave_a_thread, "3 threads"), (leave_a_process, "3 processes"), (leave_a_file, "3 open files"))
    for init, leaked in cases:
        check_finding(env_with(init=init), "releases its resources", f"three episodes leaked {leaked}", "advice")
    for process in processes:
        process.kill()
        process.wait()
    for file in files:
        os.close(file)


def hang(*args: Any, **kwargs: Any) -> Any:
    released.wait()


def hang_at_tools(self: GoodEnv, action: str) -> Any:
    return hang() if "tool" in action else GoodEnv.step(self, action)


async def block_the_loop(self: GoodEnv, action: str) -> None:
    hang()


class HangsAsync(GoodEnv):
    async def step_async(self, action: str) -> Any:
        await self.answer()

    async def answer(self) -> None:
        await asyncio.Event().wait()


class HangsAmongOthers(GoodEnv):
    n_playing = 0

    def init(self, prompt: Any) -> Any:
        HangsAmongOthers.n_playing += 1
        return super().init(prompt)

    def step(self, action: str) -> Any:
        return hang() if HangsAmongOthers.n_playing > 1 else super().step(action)

    def close(self) -> None:
        HangsAmongOthers.n_playing = 0


@pytest.mark.parametrize(
    ("cls", "rule", "message"),
    [
        (env_with(__init__=hang), FIRST_RULE, "the constructor did not return within 0.2 s. It hangs in"),
        (env_with(close=hang), FIRST_RULE, "close() did not return within 0.2 s. It hangs in"),
        (env_with(hang_at_tools), ANY_REPLY, "did not return within 0.2 s, for the reply: unclosed tags. It"),
        (HangsAsync, ANY_REPLY, "in answer: await asyncio.Event().wait()"),
        (env_with(step_async=block_the_loop), ANY_REPLY, "in block_the_loop: hang()"),
        (HangsAmongOthers, ISOLATION, "among other episodes: step() did not return within"),
        (
            env_with(aggregate_metrics=hang),
            "reports numeric metrics",
            "aggregate_metrics() did not return within 0.2 s",
        ),
    ],
)
def test_hanging_call_ends_the_check(cls: type[GoodEnv], rule: str, message: str) -> None:
    *passed, last = find(cls, timeout_seconds=0.2)
    assert {finding.verdict for finding in passed} <= {"passed"}
    assert (last.rule, last.verdict) == (rule, "failed")
    assert message in last.detail
    assert "  test_rules.py, line " in last.detail
    assert last.detail.endswith("\nThe remaining rules were skipped, because they would hang too")
