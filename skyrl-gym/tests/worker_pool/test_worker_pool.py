import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gym_kit.processes import is_running, kill, no_leaks, run_python, wait_until, workers

from skyrl_gym.worker_pool import Pool, environment

PROBE = "gym_kit.probe_worker"
ENDLESS = "[0 for _ in iter(int, 1)]"
EXIT_PROGRAM = f"""
import os, sys, threading, time
from skyrl_gym.worker_pool import Pool

pool = Pool("{PROBE}", size=1)
pool.ask(["1", 60.0], 60.0)
print(*pool.workers().idle_pids(), flush=True)
if sys.argv[1] == "dies at work":
    threading.Thread(target=pool.ask, args=(["{ENDLESS}", 60.0], 60.0)).start()
    while pool.workers().idle_pids():
        time.sleep(0.01)
    os._exit(9)
"""
FORK_PROGRAM = f"""
import os, threading, time
from skyrl_gym.worker_pool import Pool

pool = Pool("{PROBE}", size=1)
values = []
at_work = threading.Thread(target=lambda: values.append(pool.ask(["time.sleep(0.5) or 1", 60.0], 60.0)["value"]))
at_work.start()
while not pool.workers()._busy:
    time.sleep(0.01)
child = os.fork()
if child == 0:
    assert pool.ask(["2", 60.0], 60.0)["value"] == "2"
    pool.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
at_work.join()
assert values == ["1"]
assert pool.ask(["3", 60.0], 60.0)["value"] == "3"
"""


@pytest.fixture
def make_pool() -> Iterator[Callable[..., Pool]]:
    """Return a constructor of pools, which leave nothing behind when they are closed after the test."""
    pools: list[Pool] = []

    def make(size: int = 1, module: str = PROBE) -> Pool:
        pools.append(Pool(module, size))
        return pools[-1]

    with no_leaks():
        yield make
        for pool in pools:
            pool.close()


def ask(pool: Pool, expression: str, limit_s: float = 60.0) -> str:
    value: str = pool.ask([expression, limit_s], limit_s)["value"]
    return value


def test_close_ends_a_worker_that_is_still_starting(
    make_pool: Callable[..., Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_start.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    pool = make_pool(module="slow_to_start")
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, pool, "1")
        wait_until(lambda: workers("slow_to_start"))
        pool.close()
        assert workers("slow_to_start") == set()
        with pytest.raises(RuntimeError, match="workers of slow_to_start were closed during a question"):
            answer.result(timeout=60)


def test_close_ends_busy_workers(make_pool: Callable[..., Pool], question_semaphore: threading.Semaphore) -> None:
    pool = make_pool()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, pool, ENDLESS)
        assert question_semaphore.acquire(timeout=60)
        pool.close()
        assert workers(PROBE) == set()
        with pytest.raises(RuntimeError, match="were closed during a question; ask again"):
            answer.result(timeout=60)
    assert ask(pool, "6 * 7") == "42"


def test_threads_share_a_bounded_number_of_workers(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(size=2)
    seen: list[int] = []

    def square(n: int) -> str:
        seen.append(len(workers(PROBE)))
        try:
            return ask(pool, ENDLESS, 0.2) if n % 16 == 7 else ask(pool, f"{n} ** 2")
        except TimeoutError:
            return "too late"

    with ThreadPoolExecutor(16) as threads:
        squares = list(threads.map(square, range(32)))
    assert squares == ["too late" if n % 16 == 7 else str(n**2) for n in range(32)]
    assert max(seen) <= 2
    assert ask(pool, "1") == "1"
    assert 1 <= len(workers(PROBE)) <= 2


def test_dead_workers_are_replaced(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(size=3)
    with ThreadPoolExecutor(3) as threads:  # each question starts a worker, since the others are busy
        list(threads.map(ask, [pool] * 3, ["time.sleep(0.2)"] * 3))
    assert len(workers(PROBE)) == 3
    kill(workers(PROBE))
    assert ask(pool, "1") == "1"
    assert len(workers(PROBE)) == 1
    with pytest.raises(ConnectionError, match="the process ended"):
        ask(pool, "os._exit(3)")
    assert workers(PROBE) == set()


@pytest.mark.parametrize("how", ["ends", "dies at work"])
def test_workers_end_with_their_parent(how: str) -> None:
    done = run_python(EXIT_PROGRAM, how, is_checked=False)
    assert (done.returncode, done.stderr) == (9 if how == "dies at work" else 0, "")
    wait_until(lambda: not is_running(int(done.stdout)))


def test_forked_process_has_separate_workers() -> None:
    assert run_python(FORK_PROGRAM).stderr == ""


def test_worker_that_does_not_start_raises(make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match=r"a worker of gym_kit\.probe_worker did not start \(the process ended\)"):
        ask(pool, "1")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        ask(pool, "1")


def test_workers_get_the_module_path_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.syspath_prepend("relative")
    variables = environment()
    assert "secret" not in variables.values()
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == os.path.abspath("relative")
