"""A worker process does not outlive who started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

STARTS_A_WORKER_AND_DIES = """
import json, os, socket, subprocess, sys

ours, theirs = socket.socketpair()
command = [sys.executable, "-m", "skyrl_gym.worker", str(theirs.fileno()), json.dumps([sys.argv[1]])]
worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
ours.sendall(b'["hello"]\\n')
ours.recv(100)
ours.sendall(b'["make", "x", "endless:Endless", {}, {}, {}]\\n')
while not os.path.exists(sys.argv[1] + "/begun"):
    pass
print(worker.pid, flush=True)
os._exit(9)
"""
ENDLESS = """
import pathlib

class Endless:
    def __init__(self, **options):
        (pathlib.Path(__file__).parent / "begun").touch()
        while True:
            pass
"""


def test_a_worker_whose_environment_hangs_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    command = [sys.executable, "-c", STARTS_A_WORKER_AND_DIES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 9, done.stderr
    deadline = time.monotonic() + 20
    while is_running(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path("/proc").exists() else True
