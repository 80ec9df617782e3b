"""A process that holds one environment at a time for another process: `python -m skyrl_gym.worker FD SYS_PATH`.

It reads calls from a socket, one JSON list a line: `["make", id, entry_point, kwargs, env_config, extras]`,
`["init", prompt]`, `["step", action]`, `["get_metrics"]`, `["close"]`. It answers each with `["ok", value]` or
`["error", text]`, and ends when the socket is closed, or the process that started it is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from typing import Any

from skyrl_gym.core import Env
from skyrl_gym.env_config import env_config_of
from skyrl_gym.envs.registration import EnvSpec, make
from skyrl_gym.methods import call
from skyrl_gym.serialization import plain


class Worker:
    """The environment of this process."""

    def __init__(self) -> None:
        self._env: Env[Any, Any] | None = None
        self._runner = asyncio.Runner()  # one event loop from `make` to `close`

    def hello(self) -> None:
        """Say that the process is up."""

    def make(
        self, id: str, entry_point: str, kwargs: dict[str, Any], env_config: dict[str, Any], extras: dict[str, Any]
    ) -> None:
        """Make an environment; the one before is closed."""
        self.close()
        self._env = make(EnvSpec(id, entry_point, kwargs), env_config=env_config_of(env_config), extras=extras)

    def close(self) -> None:
        """Close the environment, if there is one, and end the tasks that it leaves."""
        env, self._env = self._env, None
        runner, self._runner = self._runner, asyncio.Runner()
        with closing(runner):
            if env is not None:
                call(env, runner, "close")

    def answer(self, method: str, args: list[Any]) -> Any:
        """What a call returns."""
        if method in ("hello", "make", "close"):
            own: Callable[..., Any] = getattr(self, method)
            return own(*args)
        return call(self._env, self._runner, method, *args)


def serve(fd: int) -> None:
    """Answer calls until nobody asks any more."""
    worker = Worker()
    with socket.socket(fileno=fd) as line, line.makefile("rw", encoding="utf-8", newline="\n") as stream:
        for told in stream:
            method, *args = json.loads(told)
            try:
                answer = json.dumps(["ok", worker.answer(method, args)], default=plain)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001, the boundary of a call
                traceback.print_exc()
                answer = json.dumps(["error", f"{type(error).__name__}: {error}"])
            stream.write(answer + "\n")
            stream.flush()
    worker.close()


def end_with_parent() -> None:
    """Kill this process and all that it started once its parent is gone, whatever its environment is doing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    if os.getpgrp() == os.getpid():  # the group is its own
        threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


if __name__ == "__main__":
    sys.path[:] = [path for path in json.loads(sys.argv[2]) if path not in sys.path] + sys.path
    end_with_parent()
    serve(int(sys.argv[1]))
