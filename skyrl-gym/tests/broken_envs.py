"""Environments that keep every rule, and such that break one each."""

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
        await asyncio.sleep(0)
        return super().step(action)

    def step(self, action: str) -> Any:
        raise AssertionError("step_async comes first")


class LockEnv(GoodEnv):
    """Changes what all of them share, and holds a lock meanwhile; has an event loop of its own for each call."""

    lock = threading.Lock()
    reply = ""

    def step(self, action: str) -> Any:
        with LockEnv.lock:
            LockEnv.reply = action
            asyncio.run(asyncio.sleep(0.001))
            return super().step(LockEnv.reply)


class NeedsMore(GoodEnv):
    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)
        self.map = extras["map"]


class Parses(GoodEnv):
    def step(self, action: str) -> Any:
        int(action.split()[-1].strip("."))
        return super().step(action)


class Leaves(GoodEnv):
    def step(self, action: str) -> Any:
        sys.exit(f"I am leaving, {action}")


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


class ListOfFacts(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"metadata": ["fact"]}


class Undecided:
    def __bool__(self) -> bool:
        raise ValueError("perhaps")


class PerhapsDone(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"done": Undecided()}


class Writes(GoodEnv):
    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)
        extras["max_turns"] = 3
        extras["seen"] = True


class Appends(GoodEnv):
    def init(self, prompt: Any) -> Any:
        prompt.append({"role": "user", "content": "Think!"})
        return prompt, {}


class Alarm(GoodEnv):
    """Works in the main thread only."""

    def step(self, action: str) -> Any:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return super().step(action)


class OldLoop(GoodEnv):
    """Takes it that every thread has an event loop."""

    def step(self, action: str) -> Any:
        asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))
        return super().step(action)


class LoopInLoop(GoodEnv):
    async def step_async(self, action: str) -> Any:
        loop = asyncio.get_running_loop()
        loop.run_until_complete(loop.create_future())
        return super().step(action)


class KeepsItsLoop(GoodEnv):
    """Leaves a closed event loop to whoever uses the thread next."""

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


class StopsTheLoop(GoodEnv):
    async def step_async(self, action: str) -> Any:
        asyncio.get_running_loop().stop()
        return super().step(action)


class OneThread(GoodEnv):
    """Works only in the thread in which it was made."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)
        self.database = sqlite3.connect(":memory:")

    def step(self, action: str) -> Any:
        self.database.execute("SELECT 1")
        return super().step(action)


class Shares(GoodEnv):
    """All count together, from the last `init` on."""

    n_seen = 0

    def init(self, prompt: Any) -> Any:
        Shares.n_seen = 0
        return super().init(prompt)

    def step(self, action: str) -> Any:
        Shares.n_seen += 1
        return super().step(action) | {"reward": Shares.n_seen}


class SharesItsMetrics(GoodEnv):
    """The dict that it answered with is changed by the next."""

    metrics: ClassVar[dict[str, Any]] = {}

    def init(self, prompt: Any) -> Any:
        SharesItsMetrics.metrics["steps"] = 0
        return super().init(prompt)

    def step(self, action: str) -> Any:
        SharesItsMetrics.metrics["steps"] += 1
        return super().step(action)

    def get_metrics(self) -> dict[str, Any]:
        return SharesItsMetrics.metrics


class Races(GoodEnv):
    """What it heard is what the last one heard, a moment later."""

    reply = ""

    def step(self, action: str) -> Any:
        Races.reply = action
        time.sleep(0.01)
        return super().step(Races.reply)


class RacesQuickly(GoodEnv):
    """The same, and the moment is short."""

    def step(self, action: str) -> Any:
        Races.reply = action
        return super().step(Races.reply)


class AsyncRaces(GoodEnv):
    """The same, awaited."""

    async def step_async(self, action: str) -> Any:
        Races.reply = action
        await asyncio.sleep(0.01)
        return super().step(Races.reply)


class OneAtATime(GoodEnv):
    """Bears no call beside another one."""

    free = threading.Lock()

    def step(self, action: str) -> Any:
        assert OneAtATime.free.acquire(blocking=False), "one at a time, please"
        time.sleep(0.01)
        OneAtATime.free.release()
        return super().step(action)


class Dice(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"reward": random.random()}


class BadMetrics(GoodEnv):
    @staticmethod
    def aggregate_metrics(metrics: Any) -> Any:
        return sum(m["steps"] for m in metrics) / 0


class NoMetrics(BadMetrics):
    """Nothing is ever aggregated."""

    def get_metrics(self) -> dict[str, Any]:
        return {}


class OneNumber(GoodEnv):
    @staticmethod
    def aggregate_metrics(metrics: Any) -> Any:
        return 3.0


class Lock(GoodEnv):
    def step(self, action: str) -> Any:
        return super().step(action) | {"metadata": {"lock": threading.Lock()}}


class LockAtFirst(GoodEnv):
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
    """Hangs where its `env_config` says, until it is released."""

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


class HangsAwaited(GoodEnv):
    async def step_async(self, action: str) -> Any:
        await self.answer()

    async def answer(self) -> None:
        await asyncio.Event().wait()


class BlocksTheLoop(GoodEnv):
    async def step_async(self, action: str) -> Any:
        Hangs.released.wait()


class HangsBesideOthers(GoodEnv):
    """Waits until it is the only one."""

    n_playing = 0

    def init(self, prompt: Any) -> Any:
        HangsBesideOthers.n_playing += 1
        return super().init(prompt)

    def step(self, action: str) -> Any:
        if HangsBesideOthers.n_playing > 1:
            Hangs.released.wait()
        return super().step(action)

    def close(self) -> None:
        HangsBesideOthers.n_playing = 0


class MetricsHang(GoodEnv):
    @staticmethod
    def aggregate_metrics(metrics: Any) -> Any:
        Hangs.released.wait()
