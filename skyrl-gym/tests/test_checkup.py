from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from skyrl_gym.checkup import RULES, Checkup, Finding
from skyrl_gym.envs import BUILT_IN
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.registration import EnvSpec

ROW = {"prompt": [{"role": "user", "content": "6 * 7?"}], "reward_spec": {"ground_truth": "42"}, "max_turns": 3}


class GoodEnv(BaseTextEnv):
    """Keeps every rule; says back what it heard, for three turns."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.max_turns = extras["max_turns"]

    def step(self, action: str) -> Any:
        self.turns += 1
        done = self.turns >= self.max_turns
        said = [] if done else [{"role": "user", "content": f"You wrote {len(action)} characters."}]
        return {"observations": said, "reward": 0.5, "done": done, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": self.turns}


class AsyncEnv(GoodEnv):
    """The same, awaited."""

    async def step_async(self, action: str) -> Any:
        return super().step(action)

    def step(self, action: str) -> Any:
        raise AssertionError("step_async comes first")


class NeedsMore(GoodEnv):
    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)
        self.map = extras["map"]


class Parses(GoodEnv):
    def step(self, action: str) -> Any:
        int(action.split()[-1].strip("."))
        return super().step(action)


class Endless(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"done": False}


class Talks(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"observations": [{"role": "user", "content": "Bye."}]}


class TalksNumbers(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"observations": [{"role": "user", "content": 3}]}


class NoReward(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"reward": float("nan")}


class Writes(GoodEnv):
    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)
        extras["max_turns"] = 3
        extras["seen"] = True


class Appends(GoodEnv):
    def init(self, prompt: Any) -> Any:
        prompt.append({"role": "user", "content": "Think!"})
        return prompt, {}


class Shares(GoodEnv):
    n_seen = 0

    def init(self, prompt: Any) -> Any:
        Shares.n_seen = 0
        return super().init(prompt)

    def step(self, action: str) -> Any:
        Shares.n_seen += 1
        return super().step(action) | {"reward": Shares.n_seen}


class Dice(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"reward": random.random()}


class BadMetrics(GoodEnv):
    @staticmethod
    def aggregate_metrics(metrics: Any) -> Any:
        return sum(m["steps"] for m in metrics) / 0


class Lock(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"metadata": {"lock": threading.Lock()}}


class Leaks(GoodEnv):
    released = threading.Event()

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)
        threading.Thread(target=Leaks.released.wait).start()


class CloseTwice(GoodEnv):
    is_closed = False

    def close(self) -> None:
        assert not self.is_closed, "closed already"
        self.is_closed = True


@pytest.fixture(autouse=True)
def leaked_threads_end() -> Iterator[None]:
    Leaks.released.clear()
    yield
    Leaks.released.set()


def findings(cls: type[BaseTextEnv] | str, row: Any = ROW, **env_config: Any) -> dict[str, Finding]:
    before = copy.deepcopy(row)
    found = {finding.rule: finding for finding in Checkup(EnvSpec("mine", cls), row, env_config).run()}
    assert row == before
    return found


@pytest.mark.parametrize("cls", [GoodEnv, AsyncEnv])
def test_an_environment_that_keeps_all_rules(cls: type[BaseTextEnv]) -> None:
    found = findings(cls)
    assert list(found) == list(RULES)
    assert {finding.verdict for finding in found.values()} == {"kept"}


@pytest.mark.parametrize(
    ("cls", "rule", "verdict", "told"),
    [
        (NeedsMore, "can be made and begun", "broken", "the constructor raised KeyError: 'map' (test_checkup.py, line"),
        (Parses, "takes any reply", "broken", "step() raised IndexError: list index out of range (test_checkup.py"),
        (Parses, "takes any reply", "broken", "for the reply: nothing"),
        (NoReward, "takes any reply", "broken", "step() returned reward=nan; it must be a finite number"),
        (TalksNumbers, "takes any reply", "broken", "step() returned a message with content=3"),
        (Endless, "ends by its last turn", "advice", "it was not done after 3 turns"),
        (Talks, "says nothing when it is done", "advice", "observations with done=True"),
        (Writes, "leaves its dataset row alone", "broken", "it changed extras"),
        (Appends, "leaves its dataset row alone", "broken", "it changed the messages that init() was given"),
        (Shares, "plays beside itself", "advice", "side by side came out otherwise than alone"),
        (Dice, "comes to the same again", "advice", "came out differently"),
        (BadMetrics, "reports numbers", "broken", "aggregate_metrics() raised ZeroDivisionError"),
        (Lock, "can have a process of its own", "advice", "has no JSON"),
        (Leaks, "leaves nothing behind", "advice", "three episodes left 3 threads behind"),
        (CloseTwice, "can be made and begun", "broken", "close() raised AssertionError: closed already"),
    ],
)
def test_what_breaks_a_rule_is_named(cls: type[BaseTextEnv], rule: str, verdict: str, told: str) -> None:
    finding = findings(cls)[rule]
    assert finding.verdict == verdict
    assert told in finding.told


def test_without_an_environment_nothing_else_is_checked() -> None:
    assert list(findings(NeedsMore)) == ["can be made and begun"]


@pytest.mark.parametrize("id", ["gsm8k", "gsm8k_multi_turn", "multiply", "aime"])
def test_ours_keep_all_rules(id: str) -> None:
    found = findings(BUILT_IN[id])
    assert {finding.verdict for finding in found.values()} == {"kept"}


def test_env_config_is_passed_on() -> None:
    assert findings(BUILT_IN["gsm8k"], grader="nobody")["can be made and begun"].verdict == "broken"
