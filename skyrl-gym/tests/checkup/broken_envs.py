"""Environments that keep every rule, and environments that break one each."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from typing import Any, ClassVar

from skyrl_gym.envs.base_text_env import BaseTextEnv

ROW = {"prompt": [{"role": "user", "content": "6 * 7?"}], "reward_spec": {"ground_truth": "42"}, "max_turns": 3}


class GoodEnv(BaseTextEnv):
    """Keeps every rule; reports the length of each reply, for three turns."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.max_turns = extras["max_turns"]

    def step(self, action: str) -> Any:
        self.turns += 1
        done = self.turns >= self.max_turns
        observations = [] if done else [{"role": "user", "content": f"You wrote {len(action)} characters."}]
        return {"observations": observations, "reward": 0.5, "done": done, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": self.turns}


class AsyncEnv(GoodEnv):
    """Keeps every rule with an asynchronous `step`."""

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


class NeedsMap(GoodEnv):
    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)
        self.map = extras["map"]


class ParsesReply(GoodEnv):
    def step(self, action: str) -> Any:
        int(action.split()[-1].strip("."))
        return super().step(action)


class CallsExit(GoodEnv):
    def step(self, action: str) -> Any:
        sys.exit(f"I am leaving, {action}")


class Endless(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"done": False}


class TalksWhenDone(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"observations": [{"role": "user", "content": "Bye."}]}


class SendsNumbers(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"observations": [{"role": "user", "content": 3}]}


class NanReward(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"reward": float("nan")}


class ListMetadata(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"metadata": ["fact"]}


class AmbiguousBool:
    def __bool__(self) -> bool:
        raise ValueError("perhaps")


class AmbiguousDone(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"done": AmbiguousBool()}


class ModifiesExtras(GoodEnv):
    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)
        extras["max_turns"] = 3
        extras["seen"] = True


class ModifiesPrompt(GoodEnv):
    def init(self, prompt: Any) -> Any:
        prompt.append({"role": "user", "content": "Think!"})
        return prompt, {}


class SetsSignalHandler(GoodEnv):
    """Works in the main thread only."""

    def step(self, action: str) -> Any:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return super().step(action)


class ExpectsThreadLoop(GoodEnv):
    """Expects every thread to have an event loop."""

    def step(self, action: str) -> Any:
        asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))
        return super().step(action)


class NestsLoops(GoodEnv):
    async def step_async(self, action: str) -> Any:
        loop = asyncio.get_running_loop()
        loop.run_until_complete(loop.create_future())
        return super().step(action)


class LeavesClosedLoop(GoodEnv):
    """CallsExit a closed event loop to the next user of the thread."""

    def step(self, action: str) -> Any:
        try:
            loop = asyncio.get_event_loop()
        except RuntimeError:
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
        return super().step(action)


class StopsLoop(GoodEnv):
    async def step_async(self, action: str) -> Any:
        asyncio.get_running_loop().stop()
        return super().step(action)


class OwnsThread(GoodEnv):
    """Works only in the thread that constructed it."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)
        self.database = sqlite3.connect(":memory:")

    def step(self, action: str) -> Any:
        self.database.execute("SELECT 1")
        return super().step(action)


class SharesCounter(GoodEnv):
    """All instances share a counter, which `init` resets."""

    n_seen = 0

    def init(self, prompt: Any) -> Any:
        SharesCounter.n_seen = 0
        return super().init(prompt)

    def step(self, action: str) -> Any:
        SharesCounter.n_seen += 1
        return super().step(action) | {"reward": SharesCounter.n_seen}


class SharesMetrics(GoodEnv):
    """Returns a dict that the next episode changes."""

    metrics: ClassVar[dict[str, Any]] = {}

    def init(self, prompt: Any) -> Any:
        SharesMetrics.metrics["steps"] = 0
        return super().init(prompt)

    def step(self, action: str) -> Any:
        SharesMetrics.metrics["steps"] += 1
        return super().step(action)

    def get_metrics(self) -> dict[str, Any]:
        return SharesMetrics.metrics


class Races(GoodEnv):
    """Uses the latest reply of all instances, after a pause."""

    reply = ""

    def step(self, action: str) -> Any:
        Races.reply = action
        time.sleep(0.01)
        return super().step(Races.reply)


class RacesBriefly(GoodEnv):
    """Uses the latest reply of all instances, at once."""

    def step(self, action: str) -> Any:
        Races.reply = action
        return super().step(Races.reply)


class AsyncRaces(GoodEnv):
    """Uses the latest reply of all instances, after an asynchronous pause."""

    async def step_async(self, action: str) -> Any:
        Races.reply = action
        await asyncio.sleep(0.01)
        return super().step(Races.reply)


class RefusesConcurrency(GoodEnv):
    """Refuses concurrent calls."""

    free = threading.Lock()

    def step(self, action: str) -> Any:
        assert RefusesConcurrency.free.acquire(blocking=False), "one at a time, please"
        time.sleep(0.01)
        RefusesConcurrency.free.release()
        return super().step(action)


class IsRandom(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"reward": random.random()}


class FailingAggregate(GoodEnv):
    @staticmethod
    def aggregate_metrics(metrics: Any) -> Any:
        return sum(m["steps"] for m in metrics) / 0


class NoMetrics(FailingAggregate):
    """Reports no metrics, so its `aggregate_metrics` is never called."""

    def get_metrics(self) -> dict[str, Any]:
        return {}


class NumberAggregate(GoodEnv):
    @staticmethod
    def aggregate_metrics(metrics: Any) -> Any:
        return 3.0


class LockInMetadata(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"metadata": {"lock": threading.Lock()}}


class LockFromInit(GoodEnv):
    def init(self, prompt: Any) -> Any:
        return prompt, {"lock": threading.Lock()}


class LeavesThreads(GoodEnv):
    released = threading.Event()

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)
        threading.Thread(target=LeavesThreads.released.wait).start()


class LeavesProcesses(GoodEnv):
    left: ClassVar[list[subprocess.Popen[bytes]]] = []

    def init(self, prompt: Any) -> Any:
        LeavesProcesses.left.append(subprocess.Popen(["sleep", "600"]))
        return super().init(prompt)


class CloseTwice(GoodEnv):
    is_closed = False

    def close(self) -> None:
        assert not self.is_closed, "closed already"
        self.is_closed = True


class Hangs(GoodEnv):
    """Hangs in the method that `env_config.where` names, until it is released."""

    released = threading.Event()

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)
        self.where = env_config.where
        self.hang("constructor")

    def hang(self, where: str) -> None:
        if where == self.where:
            Hangs.released.wait()

    def init(self, prompt: Any) -> Any:
        self.hang("init")
        return super().init(prompt)

    def step(self, action: str) -> Any:
        self.hang("step" if "tool" in action else "")
        return super().step(action)

    def get_metrics(self) -> dict[str, Any]:
        self.hang("get_metrics")
        return super().get_metrics()

    def close(self) -> None:
        self.hang("close")


class HangsAsync(GoodEnv):
    async def step_async(self, action: str) -> Any:
        await self.answer()

    async def answer(self) -> None:
        await asyncio.Event().wait()


class BlocksLoop(GoodEnv):
    async def step_async(self, action: str) -> Any:
        Hangs.released.wait()


class HangsAmongOthers(GoodEnv):
    """Hangs in `step` while another episode is running."""

    n_playing = 0

    def init(self, prompt: Any) -> Any:
        HangsAmongOthers.n_playing += 1
        return super().init(prompt)

    def step(self, action: str) -> Any:
        if HangsAmongOthers.n_playing > 1:
            Hangs.released.wait()
        return super().step(action)

    def close(self) -> None:
        HangsAmongOthers.n_playing = 0


class HangingAggregate(GoodEnv):
    @staticmethod
    def aggregate_metrics(metrics: Any) -> Any:
        Hangs.released.wait()
