import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from skyrl_train import threads
from skyrl_train.threads import ThreadBudget, compute_thread, half_of_cores, threads_per_process


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a machine of four cores, whose counters are in a file."""
    monkeypatch.setattr(threads, "_cores", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(threads, "INTERVAL_S", 0.0)
    n_threads = torch.get_num_threads()
    yield tmp_path / "stat"
    torch.set_num_threads(n_threads)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the time `now`, and the seconds `own` that this process has computed, for tests to set."""
    clock = SimpleNamespace(now=10.0, own=5.0)
    monkeypatch.setattr(threads.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(threads.time, "process_time", lambda: clock.own)
    return clock


def write(stat: Path, user: float, nice: float = 0.0, elsewhere: float = 0.0) -> None:
    """Write counters: `user` and `nice` seconds on core 2, and `elsewhere` on a core that this process may not use."""
    tick = os.sysconf("SC_CLK_TCK")
    lines = ["cpu  1 2 3 4 5 6 7 8 9 10"]
    for core in range(5):
        counts = [(user if core == 2 else 0), (nice if core == 2 else 0)] if core < 4 else [elsewhere, 0]
        lines.append(f"cpu{core} {int(counts[0] * tick)} {int(counts[1] * tick)} 0 1000 5 0 0 0 0 0")
    stat.write_text("\n".join([*lines, "intr 1 2 3", "ctxt 5"]))


@pytest.mark.parametrize(
    ("loads", "n_expected"),
    [
        ({"user": 1.0}, 3),
        ({"user": 2.4}, 2),
        ({"user": 100.0}, 1),
        ({"user": 0.3}, 4),
        ({"user": 0.0, "nice": 2.4}, 2),
        ({"user": 0.0, "elsewhere": 3.0}, 4),
    ],
)
def test_threads_are_the_cores_that_others_leave_free(
    stat: Path, clock: SimpleNamespace, loads: dict[str, float], n_expected: int
) -> None:
    write(stat, user=0)
    budget = ThreadBudget(4, stat)
    clock.now += 1
    write(stat, **loads)
    budget.adjust()
    assert torch.get_num_threads() == n_expected
    clock.now += 1
    budget.adjust()  # the other processes have ended
    assert torch.get_num_threads() == 4


def test_own_work_is_not_load(stat: Path, clock: SimpleNamespace) -> None:
    write(stat, user=0)
    torch.set_num_threads(4)
    budget = ThreadBudget(4, stat)
    clock.now += 1
    clock.own += 3.9
    write(stat, user=3.9)
    budget.adjust()
    assert torch.get_num_threads() == 4


def test_a_system_without_counters_gets_all_threads(stat: Path) -> None:
    torch.set_num_threads(3)
    ThreadBudget(3, stat).adjust()
    assert torch.get_num_threads() == 3


def test_the_load_of_a_pause_does_not_count(
    stat: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "ThreadBudget", lambda n_max: ThreadBudget(n_max, stat))
    monkeypatch.setattr(threads, "INTERVAL_S", 0.2)
    write(stat, user=0)
    torch.set_num_threads(4)
    with compute_thread() as executor:

        def work(user: float) -> int:
            clock.now += 1
            write(stat, user=user)
            return torch.get_num_threads()

        executor.submit(work, 0.0).result()
        clock.now += 1  # a pause, while other processes use three cores
        write(stat, user=3.0)
        assert executor.submit(work, 5.0).result() == 4
        clock.now += 0.1  # no pause: during the last call, others used two
        assert executor.submit(torch.get_num_threads).result() == 2


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs the counters of Linux")
def test_a_busy_process_takes_a_core() -> None:
    cores = sorted(os.sched_getaffinity(0))
    n_before = torch.get_num_threads()
    torch.set_num_threads(len(cores))
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cores]
    try:
        with compute_thread() as executor:
            deadline = time.monotonic() + 60
            while executor.submit(torch.get_num_threads).result() > 1:
                assert time.monotonic() < deadline, "the load was not noticed"
                time.sleep(0.05)
    finally:
        for program in programs:
            program.kill()
            program.wait()
        torch.set_num_threads(n_before)


def test_one_thread_has_all_cores_meanwhile() -> None:
    n_before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with compute_thread() as executor:
            assert torch.get_num_threads() == 1
            assert executor.submit(torch.get_num_threads).result() == 2
            assert {executor.submit(threading.get_ident).result() for _ in range(5)} != {threading.get_ident()}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(n_before)
    assert not any(thread.name.startswith("compute") for thread in threading.enumerate())


def test_a_background_thread_leaves_the_compute_thread_its_cores() -> None:
    one_core = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
    with compute_thread() as compute, one_core as background:
        before = compute.submit(torch.get_num_threads).result()
        assert background.submit(torch.get_num_threads).result() == 1
        assert compute.submit(torch.get_num_threads).result() == before


def test_both_ends_of_a_transfer_fit_on_the_cores() -> None:
    before = torch.get_num_threads()
    with half_of_cores():
        assert torch.get_num_threads() == min(before, max(1, len(os.sched_getaffinity(0)) // 2))
    assert torch.get_num_threads() == before


def test_processes_share_the_cores_that_this_one_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {1, 3, 5})
    assert [threads_per_process(n) for n in (1, 2, 3, 4)] == [3, 1, 1, 1]
