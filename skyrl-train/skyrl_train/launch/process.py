"""Ranks in this process (`LocalRank`) or another (`ConnectedRank`), and the workers of a process (`RankHost`)."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from skyrl_gym.runtime.console import guard_console
from skyrl_train.config.policy import MegatronConfig
from skyrl_train.distributed import DistributedStrategy, FSDP2Strategy, SingleStrategy
from skyrl_train.errors import ConfigError, OutOfMemoryError, WorkerError, picklable_error
from skyrl_train.launch.numa import bind_to_gpu
from skyrl_train.launch.timeouts import COLLECTIVE_TIMEOUT
from skyrl_train.models.offload import release_cached_memory
from skyrl_train.out_of_memory import describe_memory, describe_shortage, free_references, is_out_of_memory
from skyrl_train.threads import threads_per_process
from skyrl_train.types.specs import ModelSpec, Role, World
from skyrl_train.weight_sync.sync import free_port
from skyrl_train.workers.worker import Worker


class LocalRank:
    """A rank in this process. Its calls run in the single thread of `executor`."""

    def __init__(self, executor: Executor, host: RankHost) -> None:
        self._executor = executor
        self.host = host

    async def call(self, role: Role, method: str, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.host.call, role, method, args)

    async def close(self) -> None:
        with suppress(Exception):  # a collective may fail because the other ranks have ended
            await asyncio.get_running_loop().run_in_executor(self._executor, self.host.close)


class ConnectedRank:
    """A rank at the other end of a connection. Calls are pickled, so specs and objectives need importable functions."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self._rank = rank
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, f"rank-{rank}")

    async def call(self, role: Role, method: str, *args: Any) -> Any:
        """Call a method of the worker. Raise WorkerError if the process has ended."""
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
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads
    guard_console()
    RankHost(world, address, n_threads).serve(connection)


class RankHost:
    """The workers of one process, one per model, and the process group of all ranks."""

    def __init__(self, world: World, address: str | None = None, n_threads: int | None = None) -> None:
        """Join the process group at `address`: "tcp://host:port" or "env://". A single rank needs no group.

        `n_threads` is the number of torch threads. None leaves it unchanged.
        """
        if n_threads is not None:
            torch.set_num_threads(n_threads)
        device = torch.device(world.device)
        if device.type == "cuda":
            if device.index is not None:
                torch.cuda.set_device(device)
            bind_to_gpu()  # without an index, the process sees only one GPU
        self._world = world
        self.workers: dict[Role, Worker] = {}
        self._strategies: dict[MegatronConfig | None, DistributedStrategy[Any]] = {}
        if world.size == 1:
            return
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=address, rank=world.rank, world_size=world.size, timeout=COLLECTIVE_TIMEOUT
        )

    def call(self, role: Role, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of a model's worker. "load" loads a model in place of an earlier one with the same role.

        If memory runs out, free what the call has allocated, and raise OutOfMemoryError.
        """
        try:
            return self._call(role, method, args)
        except Exception as error:
            if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
                raise
            shortage = OutOfMemoryError(
                f"the {role} ran out of memory during {method} ({describe_memory()}): {describe_shortage(error)}",
                method,
            )
            free_references(error)
        release_cached_memory(torch.device(self._world.device))  # not in the `except`, which refers to the error
        raise shortage

    def _call(self, role: Role, method: str, args: tuple[Any, ...]) -> Any:
        if method == "load":
            spec, objective = args
            self.workers[spec.role] = Worker(spec, self._get_strategy(spec), objective)
            return None
        return getattr(self.workers[role], method)(*args)

    def answer(self, role: Role, method: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        """Answer the call of another process: (True, result) or (False, error)."""
        try:
            return True, self.call(role, method, args)
        except Exception as error:  # noqa: BLE001, raised by the driver
            return False, picklable_error(error, WorkerError)

    def _get_strategy(self, spec: ModelSpec) -> DistributedStrategy[Any]:
        """Return a model's strategy. Creating it is collective: all ranks must load their models in the same order."""
        megatron = spec.megatron
        if megatron not in self._strategies:
            strategy: DistributedStrategy[Any]
            if self._world.size == 1:
                strategy = SingleStrategy(self._world)
            elif megatron is None:
                strategy = FSDP2Strategy(self._world, COLLECTIVE_TIMEOUT)
            else:
                try:
                    from skyrl_train.distributed.megatron import MegatronStrategy
                except ModuleNotFoundError as error:
                    raise ConfigError(
                        f"trainer.strategy=megatron needs Megatron-Core on every node ({error}); run pip install -c "
                        "constraints.txt -e './skyrl-train[mcore]' in a clone of the repository there, or set "
                        "trainer.strategy=fsdp2"
                    ) from error
                strategy = MegatronStrategy(self._world, megatron, COLLECTIVE_TIMEOUT)
            self._strategies[megatron] = strategy
        return self._strategies[megatron]

    def serve(self, connection: Connection) -> None:
        """Execute the calls from `ConnectedRank`s until they close the connection, then close."""
        try:
            while True:
                role, method, args = pickle.loads(connection.recv_bytes())
                connection.send_bytes(pickle.dumps(self.answer(role, method, args)))
        except (EOFError, OSError, KeyboardInterrupt):
            pass
        finally:
            with suppress(Exception):  # a collective may fail because the other ranks have ended
                self.close()

    def close(self) -> None:
        """Wait for a save in progress and leave the process group."""
        for worker in self.workers.values():
            worker.close()
        if self._world.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
