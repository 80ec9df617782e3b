"""Ranks in processes started by `torchrun`. Rank 0 drives the run, and the other ranks execute its calls."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import secrets
import signal
import socket
import struct
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.config.run import RunPlacementConfig
from skyrl_train.errors import ConfigError, WorkerError
from skyrl_train.launch.process import ConnectedRank, LocalRank, RankHost
from skyrl_train.models.loading import default_device
from skyrl_train.threads import threads_per_process
from skyrl_train.types.specs import ModelSpec, World
from skyrl_train.workers.group import Rank, WorkerGroup

DRIVER = "skyrl/driver"
"""Key in torchrun's store for the address of rank 0. The address is empty if rank 0 needs no other ranks."""

STORE_TIMEOUT = timedelta(days=1)
POLL = timedelta(seconds=30)
CONNECT_TIMEOUT_S = 120.0
HANDSHAKE_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Torchrun:
    """This process's rank under `torchrun`."""

    rank: int
    size: int
    local_rank: int
    n_per_node: int

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> Torchrun | None:
        """Read the environment variables of torchrun. None if torchrun did not start this process."""
        if "TORCHELASTIC_RUN_ID" not in environ:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(environ[name]) for name in names))

    def check(self, placement: RunPlacementConfig) -> None:
        """Raise ConfigError if the configuration asks for a different number of processes than torchrun started."""
        n_nodes = self.size // self.n_per_node
        if placement.launcher not in ("auto", "torchrun"):
            raise ConfigError(
                f"trainer.placement.launcher={placement.launcher}, but torchrun has started {self.size} processes; "
                "start the command without torchrun, or remove trainer.placement.launcher"
            )
        for name, value in (("num_nodes", n_nodes), ("num_gpus_per_node", self.n_per_node)):
            configured = getattr(placement, f"policy_{name}")
            if configured not in (1, value):
                raise ConfigError(
                    f"trainer.placement.policy_{name}={configured}, but torchrun has started {n_nodes} × "
                    f"{self.n_per_node} processes (nodes × processes per node); remove "
                    f"trainer.placement.policy_{name}, or start that many with torchrun --nnodes and --nproc_per_node"
                )

    def join(self) -> RankHost:
        """Join the process group of all processes. Call it in the thread that will compute."""
        device = default_device().type
        world = World(self.rank, self.size, f"cuda:{self.local_rank}" if device == "cuda" else device)
        return RankHost(world, "env://", threads_per_process(self.n_per_node))

    def store(self) -> dist.Store:
        """Connect to the store shared by all processes."""
        return next(iter(dist.rendezvous("env://", self.rank, self.size, timeout=STORE_TIMEOUT)))[0]


class TorchrunLauncher:
    """A launcher on the processes of `torchrun`, for rank 0. Each process holds one rank of every model.

    Rank 0's own shards compute in the single thread of `executor`.
    """

    def __init__(self, executor: Executor, torchrun: Torchrun) -> None:
        self.device = default_device()
        self._executor = executor
        self._torchrun = torchrun
        self._ranks: list[Rank] = []

    async def start(self) -> None:
        """Connect to the other ranks and join their process group. WorkerError if a rank does not connect in time."""
        connections = await asyncio.to_thread(_accept_ranks, self._torchrun)
        self._ranks = [ConnectedRank(rank, connection) for rank, connection in sorted(connections.items())]
        host = await asyncio.get_running_loop().run_in_executor(self._executor, self._torchrun.join)
        self._ranks.insert(0, LocalRank(self._executor, host))

    async def load(self, spec: ModelSpec, objective: Objective | None) -> WorkerGroup:
        group = WorkerGroup(spec, self._ranks, objective)
        await group.load()
        return group

    async def close(self) -> None:
        """End the other ranks, then leave the process group."""
        for rank in reversed(self._ranks):
            await rank.close()


def _accept_ranks(torchrun: Torchrun) -> dict[int, Connection]:
    """Publish this process's address and wait until all other ranks have connected."""
    is_local = torchrun.size == torchrun.n_per_node
    key = secrets.token_bytes(32)
    connections: dict[int, Connection] = {}
    with socket.create_server(("127.0.0.1" if is_local else "", 0)) as server:
        server.settimeout(CONNECT_TIMEOUT_S)
        host = "127.0.0.1" if is_local else os.environ["MASTER_ADDR"]
        torchrun.store().set(DRIVER, json.dumps([host, server.getsockname()[1], key.hex()]))
        while len(connections) < torchrun.size - 1:
            try:
                accepted, _ = server.accept()
            except TimeoutError as error:
                missing = sorted(set(range(1, torchrun.size)) - connections.keys())
                raise WorkerError(
                    f"ranks {missing} of torchrun did not connect to {host} in {CONNECT_TIMEOUT_S:g} s; all processes "
                    "must run the same command, and reach MASTER_ADDR on any port"
                ) from error
            with accepted:
                connection = Connection(os.dup(accepted.fileno()))
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HANDSHAKE_TIMEOUT_S, 0))
                try:
                    deliver_challenge(connection, key)
                    answer_challenge(connection, key)
                    connections[int.from_bytes(connection.recv_bytes())] = connection
                except (AuthenticationError, EOFError, OSError):  # not a rank, e.g. a port scan
                    connection.close()
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return connections


def serve_driver(torchrun: Torchrun) -> None:
    """Execute rank 0's calls until it ends. Runs in all other ranks."""
    disable_progress_bar()  # transformers shows one for each file
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and rank 0 ends this one
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads
    store = torchrun.store()
    while True:
        try:
            store.wait([DRIVER], POLL)
            break
        except dist.DistStoreError:  # rank 0 is still reading its configuration and data
            continue
    if not (published := store.get(DRIVER)):
        return
    host, port, hexadecimal_key = json.loads(published)
    key = bytes.fromhex(hexadecimal_key)
    for number in (signal.SIGTERM, signal.SIGHUP):  # torchrun or a closed terminal sends them to all processes
        signal.signal(number, signal.SIG_IGN)  # rank 0 must finish its step first
    with Connection(socket.create_connection((host, port)).detach()) as connection:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send_bytes(torchrun.rank.to_bytes(4))
        torchrun.join().serve(connection)


def release_ranks(torchrun: Torchrun) -> None:
    """End the other ranks if rank 0's command has not used them."""
    store = torchrun.store()
    if not store.check([DRIVER]):
        store.set(DRIVER, "")
