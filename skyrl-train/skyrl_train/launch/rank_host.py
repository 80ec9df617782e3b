"""The part of a rank that runs inside the rank's process."""

import pickle
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.distributed import DistributedStrategy, FSDP2Strategy, SingleStrategy
from skyrl_train.errors import ConfigError, WorkerError, picklable_error
from skyrl_train.launch.numa import bind_to_gpu
from skyrl_train.launch.timeouts import COLLECTIVE_TIMEOUT
from skyrl_train.types.specs import ModelSpec, Role, World
from skyrl_train.workers.worker import Worker


class RankHost:
    """The workers of one process, one per model, and the process group of all ranks."""

    def __init__(self, world: World, address: str, n_threads: int) -> None:
        """Join the process group at `address`: "tcp://host:port" or "env://". A single rank needs no group."""
        torch.set_num_threads(n_threads)
        device = torch.device(world.device)
        if device.type == "cuda":
            if device.index is not None:
                torch.cuda.set_device(device)
            bind_to_gpu()  # without an index, the process sees only one GPU
        self._world = world
        self._workers: dict[Role, Worker] = {}
        self._strategies: dict[MegatronConfig | None, DistributedStrategy[Any]] = {}
        if world.size == 1:
            return
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=address, rank=world.rank, world_size=world.size, timeout=COLLECTIVE_TIMEOUT
        )

    def call(self, role: Role, method: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        """Call a method of a model's worker. Return (True, result) or (False, error).

        The method "load" loads a model and replaces an earlier one with the same role.
        """
        try:
            if method == "load":
                spec, objective = args
                self._workers[spec.role] = Worker(spec, self._get_strategy(spec), objective)
                return True, None
            return True, getattr(self._workers[role], method)(*args)
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
                connection.send_bytes(pickle.dumps(self.call(role, method, args)))
        except (EOFError, OSError, KeyboardInterrupt):
            pass
        finally:
            with suppress(Exception):  # a collective may fail because the other ranks have ended
                self.close()

    def close(self) -> None:
        """Wait for a save in progress and leave the process group."""
        for worker in self._workers.values():
            worker.close()
        if dist.is_initialized():
            dist.destroy_process_group()
