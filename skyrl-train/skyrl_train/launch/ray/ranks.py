"""Ranks in Ray actors."""

import asyncio
import logging
import os
from contextlib import suppress
from datetime import timedelta
from pickle import PicklingError
from typing import Any

import ray
from ray.exceptions import RayError
from transformers.utils.logging import disable_progress_bar

from skyrl_train.errors import WorkerError
from skyrl_train.launch.process import RankHost
from skyrl_train.launch.ray.placement import Device
from skyrl_train.launch.timeouts import COLLECTIVE_TIMEOUT
from skyrl_train.threads import threads_per_process
from skyrl_train.types.specs import Role, World
from skyrl_train.weight_sync.sync import free_port

CLOSE_TIMEOUT_S = 5.0


class RankActor:
    """The process of one rank."""

    def __init__(self, is_first: bool) -> None:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        disable_progress_bar()
        if is_first:  # all ranks of a model log the same messages
            logging.getLogger("skyrl_train").setLevel(logging.INFO)
        self._host: RankHost | None = None

    def describe(self) -> str:
        """Return the name of this process."""
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    def find_address(self) -> str:
        """Return a free "host:port" on this node."""
        host = ray.util.get_node_ip_address()
        return f"{host}:{free_port(host)}"

    def join(self, world: World, address: str, n_processes: int) -> timedelta:
        """Join the model's process group, and return the time limit of collectives. `n_processes` share this node."""
        self._host = RankHost(world, f"tcp://{address}", threads_per_process(n_processes))
        return COLLECTIVE_TIMEOUT

    def call(self, role: Role, method: str, *args: Any) -> tuple[bool, Any]:
        """Call a method of the worker, as `RankHost.answer` does."""
        assert self._host is not None, "join() comes first"
        return self._host.answer(role, method, args)

    def close(self) -> None:
        """Leave the process group."""
        if self._host is not None:
            self._host.close()


class RayRank:
    """A rank in an actor. Arguments of its calls may contain functions defined in `__main__`."""

    def __init__(self, role: Role, world: World, device: Device) -> None:
        """Start the actor on a reserved device, without waiting until it is ready."""
        self._world = world
        self._name = f"rank {world.rank} of the {role}"
        self._actor: Any = ray.remote(RankActor).options(**device.options()).remote(world.rank == 0)

    async def join(self, address: str, n_processes: int) -> timedelta:
        """Join the model's process group, as `RankActor.join` does."""
        self._name += f" ({await self._ask('describe')})"
        return await self._ask("join", self._world, address, n_processes)

    async def find_address(self) -> str:
        """Return a free "host:port" on the rank's node."""
        return await self._ask("find_address")

    async def call(self, role: Role, method: str, *args: Any) -> Any:
        """Call a method of the worker. Raise WorkerError if the process has ended."""
        is_result, value = await self._ask("call", role, method, *args)
        if is_result:
            return value
        raise value

    async def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the actor. WorkerError if that fails."""
        try:
            return await getattr(self._actor, method).remote(*args)
        except RayError as error:
            stage = args[1] if method == "call" else method
            raise WorkerError(f"{self._name} ended during {stage}: {_describe_end(error)}") from error
        except (TypeError, PicklingError) as error:
            raise WorkerError(
                f"{self._name} runs in another process, to which its loss and its experiment cannot be sent: "
                f"{str(error).splitlines()[0]}; keep locks, sockets and threads out of their attributes"
            ) from error

    async def close(self) -> None:
        """End the actor. Kill it if it hangs in a collective."""
        with suppress(RayError, TimeoutError):
            await asyncio.wait_for(self._actor.close.remote(), CLOSE_TIMEOUT_S)
        ray.kill(self._actor)


def _describe_end(error: RayError) -> str:
    """Return why a call to an actor failed, without Ray's list of ids."""
    text = str(error)
    if "memory" in text and "running low" in text:
        return "Ray ended it because its node ran out of memory; use more ranks, or smaller batches"
    if "Worker unexpectedly exits" in text or "connection error code" in text:
        return "it crashed or was killed (possibly out of memory); see its output above"
    if "node" in text and ("died" in text or "dead" in text) and "worker process has died" not in text:
        return "its node has died or left the cluster"
    return text.strip().splitlines()[-1]
