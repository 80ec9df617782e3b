"""Ranks in processes of this machine with a common process group: sharded training without a cluster."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.errors import WorkerError
from skyrl_train.launch.rank_host import RankHost
from skyrl_train.types.specs import ModelSpec, World
from skyrl_train.weight_sync.sync import free_port


class ProcessRank:
    """A rank in a separate process. Calls and results are pickled."""

    is_leader = True

    def __init__(self, world: World, process: BaseProcess, connection: Connection) -> None:
        self.dp = world.rank
        self._process = process
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, f"rank-{world.rank}")

    async def load(self, spec: ModelSpec, objective: Objective | None) -> None:
        """Load a model. `spec` and `objective` are pickled: functions in them must be importable."""
        await self.call("load", spec, objective)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker.

        Raises:
            WorkerError: the process has ended.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, method, args)

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            self._connection.send((method, args))
            is_result, value = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(timeout=5)
            raise WorkerError(
                f"rank {self.dp} (process {self._process.pid}) ended with exit status {self._process.exitcode} during "
                f"{method}; its own messages are above"
            ) from error
        if is_result:
            return value
        raise value

    async def close(self) -> None:
        """End the process; one that hangs in a collective is killed."""
        self._connection.close()
        await asyncio.to_thread(self._process.join, 5)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._thread.shutdown()


def start_ranks(n_ranks: int) -> list[ProcessRank]:
    """Start processes with a common gloo process group; each holds a shard of the models that a group loads on them."""
    context = multiprocessing.get_context("spawn")
    address = f"tcp://127.0.0.1:{free_port()}"
    n_threads = max(1, (os.cpu_count() or 1) // n_ranks)
    ranks = []
    for rank in range(n_ranks):
        ours, theirs = context.Pipe()
        world = World(rank, n_ranks)
        args = (theirs, world, address, n_threads)
        process = context.Process(target=_serve, args=args, name=f"rank-{rank}", daemon=True)
        process.start()
        theirs.close()
        ranks.append(ProcessRank(world, process, ours))
    return ranks


def _serve(connection: Connection, world: World, address: str, n_threads: int) -> None:
    """Carry out the calls of a `ProcessRank` until it closes the connection."""
    host = RankHost(world, address, n_threads)
    try:
        while True:
            connection.send(host.call(*connection.recv()))
    except (EOFError, KeyboardInterrupt):
        pass
    finally:
        host.close()
