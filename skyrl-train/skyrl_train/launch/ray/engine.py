"""Engines in Ray actors. Ray only places and ends the actor, while requests and tokens go over a socket."""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from transformers.utils.logging import disable_progress_bar

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.channel import listen
from skyrl_train.inference_engines.remote import RemoteEngine, new_token, serve
from skyrl_train.threads import threads_per_process

ANSWER_TIMEOUT_S = 5.0
PLACE_TIMEOUT_S = 300.0


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
