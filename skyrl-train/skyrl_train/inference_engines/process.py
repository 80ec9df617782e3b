"""Inference engines and other objects in separate processes on this machine."""

import asyncio
import faulthandler
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import torch
from transformers.utils.logging import disable_progress_bar

from skyrl_gym.runtime.console import guard_console
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.channel import listen, new_local_address
from skyrl_train.inference_engines.remote import RemoteEngine, new_token, serve

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 5.0
FAILED_START_TIMEOUT_S = 1.0  # short: a cancelled start may still be loading, but has nothing to save


class ServerProcess:
    """A process that serves one connection at a time, each with its own object: an engine or the HTTP endpoint.

    It ends with `close`, or when its parent process ends.
    """

    def __init__(self, *, n_threads: int | None = None, name: str = "engine") -> None:
        """Start the process, with `n_threads` torch threads (default: torch's). Error messages call it `name`."""
        self._name = name
        self.token = new_token()
        self._exit_status: int | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self.address, self._folder = new_local_address("engine")
        context = multiprocessing.get_context("spawn")
        child_end, self._lifeline = context.Pipe(duplex=False)
        try:
            with child_end, listen(self.address) as listener:
                args = (listener, child_end, self.token, self._folder, n_threads)
                self._process = context.Process(target=_run, args=args, name=name, daemon=True)
                self._process.start()
        except BaseException:
            self._lifeline.close()
            self._remove_folder()
            raise
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def connect(
        self, make_engine: Callable[[], InferenceEngine], *, is_owner: bool = False, start_timeout_s: float = 600.0
    ) -> RemoteEngine:
        """Make a new engine in this process. With `is_owner`, closing the engine also closes the process. Blocks."""
        end_process = self.close if is_owner else None
        return RemoteEngine(
            self.address, self.token, make_engine, self.describe_end, end_process, start_timeout_s=start_timeout_s
        )

    def describe_end(self) -> str:
        """Wait briefly for the process to end, and describe it with its exit status. Blocks."""
        with self._lock:
            if not self._is_closed:
                self._process.join(EXIT_TIMEOUT_S)
                self._exit_status = self._process.exitcode
            if self._exit_status is None:
                return f"{self._name} process {self.pid} closed the connection"
            return f"{self._name} process {self.pid} ended with exit status {self._exit_status}"

    def close(self, timeout_s: float = EXIT_TIMEOUT_S) -> None:
        """End the process. Kill it if it does not end in time. Blocks."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with suppress(OSError), self._lifeline:
                self._lifeline.send(None)
            self._process.join(timeout_s)
            if self._process.is_alive():
                logger.warning(
                    "%s process %d did not end in %g s and is killed", self._name.capitalize(), self.pid, timeout_s
                )
                self._process.kill()
                self._process.join()
            self._exit_status = self._process.exitcode
            self._process.close()
            self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


async def start_engine(
    make_engine: Callable[[], InferenceEngine], *, n_threads: int | None = None, start_timeout_s: float = 600.0
) -> RemoteEngine:
    """Start a process and make an engine in it. Closing the engine ends the process.

    For example: `await start_engine(partial(load_engine, path, dtype=torch.float32, …))`. For `n_threads`, see
    `ServerProcess`. For the other arguments, see `RemoteClient`.

    Raises:
        EngineError: the process ended, or the engine was not ready in time.
        Exception: any error from `make_engine`.
    """
    process = ServerProcess(n_threads=n_threads)
    try:
        return await asyncio.to_thread(process.connect, make_engine, is_owner=True, start_timeout_s=start_timeout_s)
    except BaseException:
        await asyncio.to_thread(process.close, FAILED_START_TIMEOUT_S)
        raise


def _run(
    listener: socket.socket, lifeline: Connection, token: bytes, folder: str | None, n_threads: int | None
) -> None:
    """Serve connections until the driver ends or sends something through the lifeline."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends this process
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads
    guard_console()
    os.setpgid(0, 0)  # keeps Ctrl-C from processes that an engine starts
    multiprocessing.current_process().daemon = False  # daemons may not have children, and vLLM starts some
    disable_progress_bar()
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    try:
        asyncio.run(_serve_until_ended(listener, lifeline, token))
    finally:
        listener.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # a killed driver cannot remove it


async def _serve_until_ended(listener: socket.socket, lifeline: Connection, token: bytes) -> None:
    loop = asyncio.get_running_loop()
    serving = loop.create_task(serve(listener, token))

    def end() -> None:
        loop.remove_reader(lifeline.fileno())  # once: a second cancellation would interrupt the engine's `close`
        serving.cancel()

    loop.add_reader(lifeline.fileno(), end)
    with suppress(asyncio.CancelledError):
        await serving
