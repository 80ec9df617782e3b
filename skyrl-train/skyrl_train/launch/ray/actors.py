"""Ranks and engines in Ray actors.

Ray carries the calls of ranks. It only places and ends the actor of an engine, whose requests and tokens go over a
socket.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from pickle import PicklingError
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from transformers.utils.logging import disable_progress_bar

from skyrl_train.errors import EngineError, WorkerError
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.channel import listen
from skyrl_train.inference_engines.remote import RemoteEngine, new_token, serve
from skyrl_train.launch.process import RankHost
from skyrl_train.launch.ray.placement import Device
from skyrl_train.launch.timeouts import COLLECTIVE_TIMEOUT
from skyrl_train.threads import threads_per_process
from skyrl_train.types.specs import Role, World
from skyrl_train.weight_sync.sync import free_port

ANSWER_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
PLACE_TIMEOUT_S = 300.0


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


class EngineActor:
    """A process that serves engines on a port of its node."""

    def __init__(self) -> None:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        disable_progress_bar()
        self._listener = listen(f"{ray.util.get_node_ip_address()}:0")

    def serve(self, token: bytes, n_processes: int, visible_devices: str) -> tuple[str, str]:
        """Serve engines to connections that send the secret `token`. Return their address and this process's name.

        `n_processes` compute concurrently on the node. `visible_devices` becomes `CUDA_VISIBLE_DEVICES`, because Ray
        knows only the engine's first GPU. It is "" without GPUs.
        """
        if visible_devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices  # CUDA reads it when it is first used
        torch.set_num_threads(threads_per_process(n_processes))
        threading.Thread(target=lambda: asyncio.run(serve(self._listener, token)), daemon=True).start()
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}", f"engine process {os.getpid()} on {host}"

    def is_alive(self) -> bool:
        """Return True."""
        return True


def start_engine_actor(options: dict[str, Any]) -> Any:
    """Start an `EngineActor` with these Ray options, without waiting until it is ready."""
    return ray.remote(EngineActor).options(**options).remote()


async def connect_engine(
    actor: Any,
    make_engine: Callable[[], InferenceEngine],
    start_timeout_s: float,
    *,
    n_processes: int,
    visible_devices: Awaitable[str] | None = None,
) -> RemoteEngine:
    """Make an engine in an actor. Closing the engine ends the actor. For the arguments, see `EngineActor.serve`.

    Raises:
        EngineError: the actor ended or found no place on the cluster, or its engine was not ready in `start_timeout_s`.
        Exception: any error from `make_engine`.
    """
    token = new_token()
    try:
        async with asyncio.timeout(PLACE_TIMEOUT_S):
            devices = "" if visible_devices is None else await visible_devices
            address, name = await actor.serve.remote(token, n_processes, devices)

        def describe_end() -> str:
            try:
                ray.get(actor.is_alive.remote(), timeout=ANSWER_TIMEOUT_S)
            except RayError:
                return f"{name} was killed or crashed"
            return f"{name} closed the connection"

        return await asyncio.to_thread(
            RemoteEngine,
            *(address, token, make_engine, describe_end, lambda: ray.kill(actor)),
            start_timeout_s=start_timeout_s,
        )
    except RayError as error:
        raise EngineError(f"the engine's process could not start: {error}") from error
    except TimeoutError as error:
        ray.kill(actor)
        raise EngineError(
            f"the Ray cluster did not start the engine's process within {PLACE_TIMEOUT_S:g} s: a node may have left; "
            "rerun the command to resume on the nodes that exist"
        ) from error
    except BaseException:
        ray.kill(actor)
        raise
