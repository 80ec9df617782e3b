"""Ranks in other processes, and process groups on this machine: sharded training without a cluster."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from skyrl_gym.runtime.console import guard_console
from skyrl_train.errors import WorkerError
from skyrl_train.launch.rank_host import RankHost
from skyrl_train.threads import threads_per_process
from skyrl_train.types.specs import Role, World
from skyrl_train.weight_sync.sync import free_port


class ConnectedRank:
    """A rank in the process at the other end of a connection.

    Calls and results are pickled, so functions in a spec or an objective must be importable.
    """

    def __init__(self, rank: int, connection: Connection) -> None:
        self._rank = rank
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, f"rank-{rank}")

    async def call(self, role: Role, method: str, *args: Any) -> Any:
        """Call a method of the worker.

        Raises:
            WorkerError: the process has ended.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, role, method, args)

    def _call(self, role: Role, method: str, args: tuple[Any, ...]) -> Any:
        request = pickle.dumps((role, method, args))
        try:
            self._connection.send_bytes(request)
            is_result, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise WorkerError(
                f"rank {self._rank} {self._describe_end()} during {method}; see its output above"
            ) from error
        if is_result:
            return value
        raise value

    def _describe_end(self) -> str:
        return "ended"

    async def close(self) -> None:
        """Close the connection. This ends the rank."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)  # also ends a call in progress
        await asyncio.to_thread(self._thread.shutdown)
        self._connection.close()


class ProcessRank(ConnectedRank):
    """A rank in a child process on this machine."""

    def __init__(self, rank: int, connection: Connection, process: BaseProcess) -> None:
        super().__init__(rank, connection)
        self._process = process

    def _describe_end(self) -> str:
        self._process.join(timeout=5)
        status = self._process.exitcode
        if status is None:
            return f"(process {self._process.pid}) closed its connection, but is still running"
        name = f" ({signal.strsignal(-status)})" if status < 0 else ""
        return f"(process {self._process.pid}) ended with exit status {status}{name}"

    async def close(self) -> None:
        """Close the connection to end the process. Kill it after 5 s, e.g. if it is stuck in a collective."""
        await super().close()
        await asyncio.to_thread(self._process.join, 5)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)


def start_ranks(n_ranks: int) -> list[ProcessRank]:
    """Start `n_ranks` processes that form a gloo process group. Each holds a shard of every model loaded on them."""
    context = multiprocessing.get_context("spawn")
    address = f"tcp://127.0.0.1:{free_port()}"
    n_threads = threads_per_process(n_ranks)
    ranks = []
    for rank in range(n_ranks):
        ours, theirs = context.Pipe()
        args = (theirs, World(rank, n_ranks), address, n_threads)
        process = context.Process(target=_serve, args=args, name=f"rank-{rank}", daemon=True)
        process.start()
        theirs.close()
        ranks.append(ProcessRank(rank, ours, process))
    return ranks


def _serve(connection: Connection, world: World, address: str, n_threads: int) -> None:
    faulthandler.enable()  # prints the Python stack if native code crashes
    guard_console()
    RankHost(world, address, n_threads).serve(connection)
