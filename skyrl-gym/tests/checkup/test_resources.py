import subprocess
import threading
from pathlib import Path

import pytest
from gym_kit.processes import is_running, kill, run_python, wait_until

from skyrl_gym.checkup.resources import child_processes

STUCK = """
import atexit, os, subprocess, threading
from concurrent.futures import ThreadPoolExecutor
from skyrl_gym.checkup.resources import child_processes, exit_soon

before = child_processes()
child = subprocess.Popen(["sleep", "600"])
ThreadPoolExecutor().submit(threading.Event().wait)
print(child.pid, flush=True)
exit_soon(3, child_processes() - before)
assert child.wait() == -9
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the children of a process are listed on Linux alone")
def test_child_processes_of_all_threads_are_listed() -> None:
    before = child_processes()
    started: list[subprocess.Popen[bytes]] = []
    has_started, released = threading.Event(), threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["sleep", "600"]))
        has_started.set()
        released.wait()

    thread = threading.Thread(target=start)
    thread.start()
    has_started.wait()
    children = child_processes()
    released.set()
    thread.join()
    assert children - before == {started[0].pid}
    kill(children - before)
    started[0].wait()


def test_stuck_process_exits_and_kills_its_children() -> None:
    done = run_python(STUCK, is_checked=False)
    assert (done.returncode, done.stderr) == (3, "")
    wait_until(lambda: not is_running(int(done.stdout)))
