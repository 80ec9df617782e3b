"""Many programs, a quarter of them hostile, get the right verdicts and leave nothing behind.

TEST_PROGRAMS=1000 grades a thousand.
"""

from __future__ import annotations

import json
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from isolation.hostile import HOSTILE
from isolation.traces import Traces

from skyrl_gym.envs.lcb.env import LCBEnv

N_PROGRAMS, N_THREADS = int(os.environ.get("TEST_PROGRAMS", "200")), 8
TESTS = json.dumps([{"input": f"{n}\n{n}\n", "output": str(2 * n), "testtype": "stdin"} for n in (1, 20, -3)])
RIGHT = ["print(int(input()) + int(input()))", "import sys\nprint(sum(map(int, sys.stdin.read().split())))"]
WRONG = ["print(2)", "print(int(input()) * 2 + 1)", "input() + 1", "x =", "print(20 + int(input()))", ""]
PROBES = ["import os; os.kill(1, 9)", "import socket; socket.create_connection(('127.0.0.1', 22), 1)"]


def programs() -> list[tuple[str, float]]:
    """Return programs and their expected rewards, shuffled."""
    harm = [source for source, _ in HOSTILE.values()] + PROBES
    sample = [(harm[i % len(harm)], 0.0) for i in range(N_PROGRAMS // 4)]
    sample += [(RIGHT[i % len(RIGHT)], 1.0) for i in range(N_PROGRAMS // 2)]
    sample += [(WRONG[i % len(WRONG)], 0.0) for i in range(N_PROGRAMS - len(sample))]
    random.Random(0).shuffle(sample)
    return sample


def count_resources() -> tuple[int, int, int]:
    """Return the numbers of children, descriptors and threads of this process."""
    me = psutil.Process()
    return len(me.children(recursive=True)), me.num_fds(), threading.active_count()


def reward(source: str) -> float:
    settings = {"timeout": 1.0, "memory_mb": 256}
    with LCBEnv(settings, {"reward_spec": {"ground_truth": TESTS}}) as env:
        value = env.step(f"```python\n{source}\n```")["reward"]
        assert isinstance(value, float)
        return value


@pytest.mark.timeout(600)
def test_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces()
    traces.record(monkeypatch)
    sample = programs()
    reward(RIGHT[0])  # finds out the isolation level
    before, memory = count_resources(), psutil.Process().memory_info().rss
    with ThreadPoolExecutor(N_THREADS) as pool:
        rewards = list(pool.map(reward, [source for source, _ in sample]))
    assert rewards == [expected for _, expected in sample]
    assert count_resources() == before
    assert (traces.processes(), traces.folders()) == (set(), set())
    assert psutil.Process().memory_info().rss < memory + (256 << 20)
