"""A process that runs one environment at a time on behalf of another process: `python -m skyrl_gym.runtime.worker FD
SYS_PATH`.

It reads calls from a socket, one JSON list per line: `["make", id, entry_point, kwargs, env_config, extras]`, `["init",
prompt]`, `["step", action]`, `["get_metrics"]`, `["close"]`. It answers each with `["ok", value]` or `["error", text]`.
It exits when the socket closes or the parent process is gone. Only the original process answers: if an environment
forks, the child ends when its call returns.
"""

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
from contextlib import closing, suppress
from typing import Any

from skyrl_gym.core import Env
from skyrl_gym.envs.registration import EnvSpec, make
from skyrl_gym.runtime.console import guard_console
from skyrl_gym.runtime.env_config import copy_env_config
from skyrl_gym.runtime.methods import call_method, end_forked_children
from skyrl_gym.runtime.serialization import to_json_value
from skyrl_gym.runtime.text import describe_error


class EnvWorker:
    """Owner of this process's environment and event loop."""

    def __init__(self) -> None:
        self._env: Env[Any, Any] | None = None
        self._runner = asyncio.Runner()  # one event loop from `make` to `close`

    def hello(self) -> None:
        """Confirm that the process has started."""

    def make(
        self, id: str, entry_point: str, kwargs: dict[str, Any], env_config: dict[str, Any], extras: dict[str, Any]
    ) -> None:
        """Make an environment, closing the previous one first."""
        self.close()
        self._env = make(EnvSpec(id, entry_point, kwargs), env_config=copy_env_config(env_config), extras=extras)

    def close(self) -> None:
        """Close the environment, if any, and cancel its remaining tasks."""
        env, self._env = self._env, None
        runner, self._runner = self._runner, asyncio.Runner()
        with closing(runner):
            if env is not None:
                call_method(env, runner, "close")

    def call(self, method: str, args: list[Any]) -> Any:
        """Call a method of this worker or its environment, and return its value."""
        if method in ("hello", "make", "close"):
            own: Callable[..., Any] = getattr(self, method)
            return own(*args)
        return call_method(self._env, self._runner, method, *args)


def serve(fd: int) -> None:
    """Answer calls until the socket is closed, or is reset because the parent was killed."""
    worker = EnvWorker()
    with (
        suppress(ConnectionResetError, BrokenPipeError),
        socket.socket(fileno=fd) as connection,
        connection.makefile("rw", encoding="utf-8", newline="\n") as stream,
    ):
        for line in stream:
            method, *args = json.loads(line)
            try:
                with end_forked_children():
                    answer = json.dumps(["ok", worker.call(method, args)], default=to_json_value)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001, the boundary of a call
                traceback.print_exc()
                answer = json.dumps(["error", describe_error(error)])
            stream.write(answer + "\n")
            stream.flush()
    worker.close()


def end_with_parent() -> None:
    """Kill this process and its children as soon as the parent is gone, even if the environment is busy."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    if os.getpgrp() == os.getpid():  # the group holds only this process and its children
        threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


if __name__ == "__main__":
    sys.path[:] = [path for path in json.loads(sys.argv[2]) if path not in sys.path] + sys.path
    guard_console()
    end_with_parent()
    serve(int(sys.argv[1]))
