"""A process that holds one environment at a time for another process: `python -m skyrl_gym.worker FD SYS_PATH`.

It reads calls from a socket, one JSON list a line: `["make", id, entry_point, kwargs, env_config, extras]`,
`["init", prompt]`, `["step", action]`, `["get_metrics"]`, `["close"]`. It answers each with `["ok", value]` or
`["error", text]`, and ends when the socket is closed, or the process that started it is gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from skyrl_gym.core import Env
from skyrl_gym.envs.registration import EnvSpec, make


class EnvConfig(SimpleNamespace):
    """A section of the configuration as environments read it: `config.topk`, `config["topk"]`, `config.get("topk")`."""

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The value under a name."""
        return vars(self).get(name, default)


class Worker:
    """The environment of this process."""

    def __init__(self) -> None:
        self._env: Env[Any, Any] | None = None

    def hello(self) -> None:
        """Say that the process is up."""

    def make(
        self, id: str, entry_point: str, kwargs: dict[str, Any], env_config: dict[str, Any], extras: dict[str, Any]
    ) -> None:
        """Make an environment; the one before is closed."""
        self.close()
        config = json.loads(json.dumps(env_config), object_hook=lambda section: EnvConfig(**section))
        self._env = make(EnvSpec(id, entry_point, kwargs), env_config=config, extras=extras)

    def close(self) -> None:
        """Close the environment, if there is one."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def answer(self, method: str, args: list[Any]) -> Any:
        """What a call returns."""
        if method in ("hello", "make", "close"):
            own: Callable[..., Any] = getattr(self, method)
            return own(*args)
        return getattr(self._env, method)(*args)


def serve(fd: int) -> None:
    """Answer calls until nobody asks any more."""
    worker = Worker()
    with socket.socket(fileno=fd) as line, line.makefile("rw", encoding="utf-8", newline="\n") as stream:
        for call in stream:
            method, *args = json.loads(call)
            try:
                answer = json.dumps(["ok", worker.answer(method, args)], default=_plain)
            except Exception as error:  # noqa: BLE001, the boundary of a call
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


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy and torch as JSON has them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r} has no JSON, which an environment in a process of its own must answer with")


if __name__ == "__main__":
    sys.path[:] = [path for path in json.loads(sys.argv[2]) if path not in sys.path] + sys.path
    end_with_parent()
    serve(int(sys.argv[1]))
