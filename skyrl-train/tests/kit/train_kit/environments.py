"""Environments that record their calls, and environments that fail as their dataset row specifies."""

import asyncio
import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType

METHODS = ("make", "init", "step", "get_metrics", "close")
RAISED = ("raise", "exit", "stop_iteration")
RUBBISH = ("none", "string", "nan", "no_reward", "unknown_reward")
HANGS = ("spin", "sleep", "lock")
DEATHS = ("segfault", "os_exit", "sigkill")
RELEASED = threading.Event()
"""Event that ends all hangs in this process. Hangs in worker processes never end."""


@dataclass
class Journal:
    """A record of the environments of a test."""

    made: list["StoryEnv"] = field(default_factory=list)
    closed: list["StoryEnv"] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    do: dict[str, Callable[[], object]] = field(default_factory=dict)  # hooks by method, called first

    def open_environments(self) -> list["StoryEnv"]:
        return [env for env in self.made if self.closed.count(env) != 1]


class StoryEnv(BaseTextEnv):
    """An environment that asks `n_turns` times to go on; turn k has a reward of k / 4.

    The row may name a method that `fails`, the errors that methods `raises`, and the values that they `returns`.
    """

    def __init__(self, journal: Journal, env_config: dict[str, Any], extras: dict[str, Any]) -> None:
        super().__init__()
        self.journal = journal
        self.env_config = env_config
        self.extras = extras
        self.replies: list[str] = []
        self.prompt: ConversationType = []
        self._visit("make")
        journal.made.append(self)

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        self._visit("init")
        self.prompt = prompt
        return self._answer("init", (prompt, {}))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self._visit("step")
        self.turns += 1
        self.replies.append(action)
        is_over = self.turns == self.extras.get("n_turns", 3)
        observation = {"role": "user", "content": f"And then? ({self.turns} of {self.extras.get('n_turns', 3)})"}
        output = BaseTextEnvStepOutput(
            observations=[] if is_over else [observation], reward=self.turns / 4, done=is_over, metadata={}
        )
        return self._answer("step", output)

    def grade_unfinished(self) -> float | None:
        self._visit("grade_unfinished")
        return self._answer("grade_unfinished", 0.0)

    def get_metrics(self) -> dict[str, Any]:
        self._visit("get_metrics")
        return self._answer("get_metrics", {"turns": self.turns, "n_letters": sum(map(len, self.replies))})

    def close(self) -> None:
        self.journal.closed.append(self)
        self._visit("close")

    def _visit(self, method: str) -> None:
        self.journal.threads.add(threading.current_thread().name)
        if method in self.journal.do:
            self.journal.do[method]()
        if self.extras.get("fails") == method and self.turns >= self.extras.get("fails_after", 0):
            raise RuntimeError(f"no {method} today")
        if method in self.extras.get("raises", {}):
            raise self.extras["raises"][method]

    def _answer(self, method: str, answer: Any) -> Any:
        return self.extras["returns"].get(method, answer) if "returns" in self.extras else answer


class AsyncStoryEnv(StoryEnv):
    """A `StoryEnv` with `…_async` methods; `step_async` takes the seconds of `extras["sleeps"]`."""

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        await asyncio.sleep(self.extras.get("sleeps", 0))
        return self.step(action)

    async def close_async(self) -> None:
        self.close()


class TidyEnv(BaseTextEnv):
    """An environment whose process takes `seconds` to exit, and then creates a file."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        atexit.register(lambda: (time.sleep(extras["seconds"]), Path(extras["file"]).touch()))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={})


class FaultyEnv(BaseTextEnv):
    """An environment of three turns; `fault` occurs in method `where`, for `step` in turn `turn`."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.extras = extras
        self.leaks: list[Any] = []
        self._fault("make")

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        answer = self._fault("init")
        return (prompt, {}) if answer is None else answer

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        answer = self._fault("step") if self.turns == self.extras.get("turn", 1) else None
        if answer is not None:
            return answer
        observation = {"role": "user", "content": f"{self.turns} of 3: {len(action)}"}
        return BaseTextEnvStepOutput(
            observations=[observation], reward=float(self.turns), done=self.turns == 3, metadata={}
        )

    def get_metrics(self) -> dict[str, Any]:
        answer = self._fault("get_metrics")
        return {"turns": self.turns} if answer is None else answer

    def close(self) -> None:
        self._fault("close")

    def _fault(self, method: str) -> Any:
        if self.extras.get("where") != method:
            return None
        return trigger(self.extras.get("fault", ""), self.leaks, self.extras.get("pids", os.devnull))


class FaultyAsyncEnv(FaultyEnv):
    """A `FaultyEnv` with async methods."""

    async def init_async(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        await self._hang("init")
        return self.init(prompt)

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        if self.turns + 1 == self.extras.get("turn", 1):
            await self._hang("step")
        return self.step(action)

    async def close_async(self) -> None:
        await self._hang("close")
        self.close()

    async def _hang(self, method: str) -> None:
        if self.extras.get("where") == method and self.extras.get("fault") == "await":
            await asyncio.Event().wait()


class AwaitedEnv(BaseTextEnv):
    """An environment of two turns with async methods only, which share an event loop."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def init_async(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        self.loop = asyncio.get_running_loop()
        return prompt, {}

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0)
        self.turns += 1
        observations = [{"role": "user", "content": "on"}]
        return BaseTextEnvStepOutput(observations=observations, reward=1.0, done=self.turns == 2, metadata={})

    async def close_async(self) -> None:
        assert asyncio.get_running_loop() is self.loop


def hang_until_released(kind: str) -> None:
    """Block until RELEASED is set."""
    if kind == "lock":
        RELEASED.wait()
    while not RELEASED.is_set():
        if kind == "sleep":
            time.sleep(0.05)


def kill_process(kind: str) -> None:
    """End the whole process."""
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "os_exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


def trigger(fault: str, leaks: list[Any], pids: str) -> Any:
    """Trigger a fault; return its invalid result, if any. PIDs of leaked processes are appended to the file `pids`."""
    if fault == "raise":
        raise RuntimeError("no")
    if fault == "exit":
        sys.exit(3)
    if fault == "stop_iteration":
        next(iter(()))
    if fault == "nap":
        time.sleep(0.5)
    if fault in HANGS:
        hang_until_released(fault)
    if fault in DEATHS:
        kill_process(fault)
    if fault == "leak":
        leaks.append(open(os.devnull))  # noqa: SIM115
        leaks.append(subprocess.Popen(["sleep", "1000"]))
        with open(pids, "a") as file:
            file.write(f"{leaks[-1].pid}\n")
        leaks.append(threading.Thread(target=time.sleep, args=(1000,), daemon=True))
        leaks[-1].start()
    step = {"observations": [{"role": "user", "content": "on"}], "reward": 1.0, "done": False, "metadata": {}}
    return {
        "string": "rubbish",
        "none": ["rubbish"],
        "nan": step | {"reward": float("nan")},
        "no_reward": {"observations": [], "done": True},
        "unknown_reward": step | {"reward": None},
    }.get(fault)
