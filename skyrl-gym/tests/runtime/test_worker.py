"""A worker runs an environment for another process and does not outlive its parent."""

import asyncio
import json
import select
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gym_kit.processes import is_running, run_python, wait_until
from PIL import Image

from skyrl_gym.core import Env
from skyrl_gym.error import InvalidAnswer
from skyrl_gym.images import find_images, read_image, read_parts
from skyrl_gym.runtime.env_config import EnvConfig
from skyrl_gym.runtime.serialization import to_json_value
from skyrl_gym.runtime.worker import EnvWorker, serve

PARENT_PROGRAM = """
import json, os, socket, subprocess, sys

ours, theirs = socket.socketpair()
command = [sys.executable, "-m", "skyrl_gym.runtime.worker", str(theirs.fileno()), json.dumps([sys.argv[1]])]
worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
ours.sendall(b'["hello"]\\n')
ours.recv(100)
ours.sendall(b'["make", "x", "endless:Endless", {}, {}, {}]\\n')
while not os.path.exists(sys.argv[1] + "/begun"):
    pass
print(worker.pid, flush=True)
os._exit(9)
"""
ENDLESS_ENV = """
import pathlib

class Endless:
    def __init__(self, **options):
        (pathlib.Path(__file__).parent / "begun").touch()
        while True:
            pass
"""


def test_worker_with_a_hanging_environment_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS_ENV)
    done = run_python(PARENT_PROGRAM, str(tmp_path), is_checked=False)
    assert done.returncode == 9, done.stderr
    wait_until(lambda: not is_running(int(done.stdout)))


class AsyncEnv(Env[Any, Any]):
    """Asynchronous environment that starts a task that never ends."""

    def __init__(self, env_config: EnvConfig, extras: dict[str, Any]) -> None:
        self.env_config = env_config
        self.events: list[str] = []

    async def init_async(self, prompt: list[Any]) -> list[Any]:
        self.task = asyncio.create_task(self._wait())
        return prompt

    async def step_async(self, action: str) -> dict[str, Any]:
        await asyncio.sleep(0)
        if action == "cancel":
            raise asyncio.CancelledError("mine")
        return {"at": datetime(2026, 1, 2), "many": np.arange(2), "one": np.float32(0.5), "action": action}

    def get_metrics(self) -> dict[str, Any]:
        return {"topk": self.env_config.topk}

    async def close_async(self) -> None:
        self.events.append("closed")

    async def _wait(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("task ended")


def test_coroutines_share_an_event_loop_until_close() -> None:
    worker = EnvWorker()
    worker.call("make", ["awaited", f"{__name__}:AsyncEnv", {}, {"topk": 3, "inner": {"a": 1}}, {}])
    env: Any = worker._env
    assert (env.env_config.topk, env.env_config.inner.a) == (3, 1)  # sections have attributes
    assert worker.call("init", [["Go"]]) == ["Go"]
    assert worker.call("step", ["on"])["action"] == "on"
    worker.call("close", [])
    assert env.events == ["closed", "task ended"]
    worker.call("close", [])
    assert env.events == ["closed", "task ended"]


def test_worker_imports_no_heavy_modules() -> None:
    heavy = ("pydantic", "numpy", "argparse", "concurrent.futures.thread", "skyrl_gym.runtime.validation")
    code = f"import sys, skyrl_gym.runtime.worker; print([name for name in {heavy} if name in sys.modules])"
    assert run_python(code).stdout == "[]\n"


def ask(connection: socket.socket, *calls: list[Any]) -> list[Any]:
    """Make calls; return the answers, and what else arrives until the worker has ended."""
    answers = []
    connection.settimeout(60)
    with connection, connection.makefile("rw") as stream:
        for call in calls:
            stream.write(json.dumps(call) + "\n")
            stream.flush()
            answers.append(json.loads(stream.readline()))
        time.sleep(0.2)  # in which a forked child would answer, too
        connection.shutdown(socket.SHUT_WR)
        return answers + [json.loads(line) for line in stream]


def test_socket_protocol() -> None:
    ours, theirs = socket.socketpair()
    make = ["make", "awaited", f"{__name__}:AsyncEnv", {}, {"topk": 3}, {}]
    server = threading.Thread(target=serve, args=(theirs.detach(),), daemon=True)
    server.start()
    answers = ask(ours, make, ["step", "on"], ["step", "cancel"], ["get_metrics"])
    server.join(timeout=60)
    assert not server.is_alive()
    assert answers == [
        ["ok", None],
        ["ok", {"at": "2026-01-02T00:00:00", "many": [0, 1], "one": 0.5, "action": "on"}],
        ["error", "CancelledError: mine"],
        ["ok", {"topk": 3}],
    ]


@pytest.mark.parametrize("waits", [True, False])
def test_a_worker_whose_parent_was_killed_ends_without_an_error(waits: bool) -> None:
    """The socket is reset if it has an unread answer, and else closed."""
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor() as threads:
        server = threads.submit(serve, theirs.detach())
        ours.sendall(json.dumps(["make", "awaited", f"{__name__}:AsyncEnv", {}, {}, {}]).encode() + b"\n")
        if waits:
            select.select([ours], [], [], 60)
        ours.close()
        server.result(timeout=60)


FORKING_ENV = """
import os
from skyrl_gym.core import Env

class Forking(Env):
    def __init__(self, **options):
        self.n_steps = 0

    def step(self, action):
        os.fork()
        self.n_steps += 1
        if action == "raise":
            raise ValueError("no")
        return self.n_steps
"""


def test_a_forked_child_that_returns_answers_nothing(tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text(FORKING_ENV)
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "skyrl_gym.runtime.worker", str(theirs.fileno()), json.dumps([str(tmp_path)])]
        worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
    answers = ask(ours, ["make", "x", "forking:Forking", {}, {}, {}], ["step", "a"], ["step", "raise"], ["step", "a"])
    assert worker.wait(30) == 0
    assert answers == [["ok", None], ["ok", 1], ["error", "ValueError: no"], ["ok", 3]]


def test_images_cross_the_boundary_as_data_urls() -> None:
    image = Image.new("RGB", (2, 1), "red")
    parts = [{"type": "image", "image": source} for source in (image, read_image(image), np.array(image))]
    answer = json.loads(json.dumps([{"role": "user", "content": parts}], default=to_json_value))
    images = find_images([{"content": read_parts(answer[0]["content"])}])
    assert [found.open().getpixel((1, 0)) for found in images] == [(255, 0, 0)] * 3
    for rows in ([[1, 2]], [[[1, 2, 3]], []], [[[256, 0, 0]]], [], [[["a", "b", "c"]]]):
        with pytest.raises(InvalidAnswer, match="a list cannot become an image"):
            read_image(rows)
