"""Each test has environments that break one rule, beside the finding that must report it."""

from __future__ import annotations

import asyncio
import copy
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
    """Return the findings of all rules."""
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


# -- "can be constructed and initialized"


def test_check_ends_if_the_environment_cannot_be_constructed() -> None:
    def need_map(self: GoodEnv, env_config: Any, extras: dict[str, Any]) -> None:
        extras["map"]

    (finding,) = find(env_with(__init__=need_map))
    assert (finding.rule, finding.verdict) == ("can be constructed and initialized", "failed")
    assert "the constructor raised KeyError: 'map' (test_rules.py, line " in finding.detail
    assert find(BUILT_IN["gsm8k"], grader="nobody")[0].verdict == "failed"


def test_close_may_be_called_twice() -> None:
    def close(self: Any) -> None:
        assert not hasattr(self, "is_closed"), "closed already"
        self.is_closed = True

    for message in ("close() raised AssertionError: closed already", ", the second time"):
        check_finding(env_with(close=close), "can be constructed and initialized", message)


# -- "accepts any reply"


class Ambiguous:
    def __bool__(self) -> bool:
        raise ValueError("perhaps")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"reward": float("nan")}, "step() returned reward=nan; it must be a finite number"),
        ({"metadata": ["fact"]}, "step() returned metadata=['fact']; it must be a dict"),
        ({"done": Ambiguous()}, "it must be True or False"),
        ({"observations": [{"role": "user", "content": 3}]}, "step() returned a message with content=3"),
    ],
)
def test_output_of_step_is_validated(output: dict[str, Any], message: str) -> None:
    check_finding(env_returning(**output), "accepts any reply", message)


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


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda self, reply: reply.split()[-1], "step() raised IndexError: list index out of range (test_rules.py"),
        (lambda self, reply: reply.split()[-1], "for the reply: empty text"),
        (lambda self, reply: sys.exit("I am leaving"), "step() raised SystemExit: I am leaving"),
        (lambda self, reply: asyncio.get_event_loop(), "RuntimeError: There is no current event loop in thread"),
        (lambda self, reply: signal.signal(14, signal.SIG_DFL), "ValueError: signal only works in main thread of"),
        (
            lambda self, reply: signal.signal(14, signal.SIG_DFL),
            "; training makes calls in threads other than the main",
        ),
        (leave_a_closed_loop, "step() raised RuntimeError: Event loop is closed"),
        (nest_loops, "RuntimeError: This event loop is already running (test_rules.py"),
        (stop_the_loop, "it stopped the event loop, in which the trainer and all other"),
    ],
)
def test_step_that_fails_in_training_is_reported(step: Step, message: str) -> None:
    method = "step_async" if asyncio.iscoroutinefunction(step) else "step"
    check_finding(env_with(**{method: step}), "accepts any reply", message)


def test_environment_that_owns_a_thread_is_reported() -> None:
    def open_database(self: Any, prompt: Any) -> Any:
        self.database = sqlite3.connect(":memory:")
        return prompt, {}

    cls = env_with(lambda self, action: self.database.execute("SELECT 1"), init=open_database)
    check_finding(cls, "accepts any reply", "SQLite objects created in a thread can only be used in that same")


# -- "ends by its last turn" and "returns no observations when done"


def test_advice_on_the_last_turn() -> None:
    check_finding(env_returning(done=False), "ends by its last turn", "it was not done after 3 turns", "advice")
    talkative = env_returning(observations=user("Bye."))
    check_finding(talkative, "returns no observations when done", "observations with done=True", "advice")


# -- "does not modify its dataset row"


def test_modified_rows_are_reported() -> None:
    def modify_extras(self: GoodEnv, env_config: Any, extras: dict[str, Any]) -> None:
        GoodEnv.__init__(self, env_config, extras)
        extras["seen"] = True

    def modify_prompt(self: GoodEnv, prompt: Any) -> Any:
        prompt.extend(user("Think!"))
        return prompt, {}

    rule = "does not modify its dataset row"
    check_finding(env_with(__init__=modify_extras), rule, "it modified extras")
    check_finding(env_with(init=modify_prompt), rule, "it modified the messages passed to init()")


# -- "isolates its episodes" and "is deterministic"


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


SharesCounter = env_with(reward_shared, init=reset_shared)
SharesMetrics = env_with(count_shared, init=reset_shared, get_metrics=lambda self: shared)


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


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (SharesCounter, "interleaved episodes had other results than a single one"),
        (SharesMetrics, "interleaved episodes had other results than a single one"),
        (env_with(race), "episodes with concurrent calls had other results"),
        (env_with(partialmethod(race, pause_s=0.01)), "episodes with concurrent calls had other results"),
        (env_with(step_async=race_async), "episodes with concurrent calls had other results"),
        (RefusesConcurrency, "among other episodes with concurrent calls"),
        (RefusesConcurrency, "step() raised AssertionError: one at a time, please"),
    ],
)
def test_interference_of_episodes_is_reported(cls: type[GoodEnv], message: str) -> None:
    check_finding(cls, "isolates its episodes", message)


def test_random_environment_gets_advice() -> None:
    cls = env_with(lambda self, action: GoodEnv.step(self, action) | {"reward": random.random()})
    check_finding(cls, "isolates its episodes", "had other results together than alone: they are random, or", "advice")
    check_finding(cls, "is deterministic", "had different results", "advice")


# -- "reports numeric metrics", "can run in a separate process" and "releases its resources"


def test_metrics_that_cannot_be_aggregated_are_reported() -> None:
    rule = "reports numeric metrics"
    failing = env_with(aggregate_metrics=staticmethod(divide_by_zero))
    check_finding(failing, rule, "aggregate_metrics() raised ZeroDivisionError")
    number = env_with(aggregate_metrics=staticmethod(lambda metrics: 3.0))
    check_finding(number, rule, "aggregate_metrics() returned 3.0; return a dict")


def test_answers_that_cannot_be_written_as_json_get_advice() -> None:
    lock = threading.Lock()
    for cls in (env_returning(metadata={"lock": lock}), env_with(init=lambda self, prompt: (prompt, {"lock": lock}))):
        check_finding(cls, "can run in a separate process", "cannot be written as JSON", "advice")


def test_leaked_threads_and_processes_get_advice() -> None:
    processes: list[subprocess.Popen[bytes]] = []

    def leave_a_thread(self: GoodEnv, prompt: Any) -> Any:
        threading.Thread(target=released.wait).start()
        return prompt, {}

    def leave_a_process(self: GoodEnv, prompt: Any) -> Any:
        processes.append(subprocess.Popen(["sleep", "600"]))
        return prompt, {}

    for init, leaked in ((leave_a_thread, "3 threads"), (leave_a_process, "3 processes")):
        check_finding(env_with(init=init), "releases its resources", f"three episodes leaked {leaked}", "advice")
    for process in processes:
        process.kill()
        process.wait()


# -- calls that do not return


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


FIRST_RULE = "can be constructed and initialized"


@pytest.mark.parametrize(
    ("cls", "rule", "message"),
    [
        (env_with(__init__=hang), FIRST_RULE, "the constructor did not return within 0.2 s. It is in"),
        (env_with(init=hang), FIRST_RULE, "init() did not return within 0.2 s. It is in"),
        (env_with(get_metrics=hang), FIRST_RULE, "get_metrics() did not return within 0.2 s. It is in"),
        (env_with(close=hang), FIRST_RULE, "close() did not return within 0.2 s. It is in"),
        (env_with(hang_at_tools), "accepts any reply", "did not return within 0.2 s, for the reply: unclosed tags. It"),
        (HangsAsync, "accepts any reply", "in answer: await asyncio.Event().wait()"),
        (env_with(step_async=block_the_loop), "accepts any reply", "in block_the_loop: hang()"),
        (HangsAmongOthers, "isolates its episodes", "among other episodes: step() did not return within"),
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
    assert last.detail.endswith("\nThe check ends here: the remaining rules would hang too")
