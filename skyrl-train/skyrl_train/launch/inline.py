"""Runs on one device, with one rank per model in this process.

The engine generates with the policy's own tensors, or it has a copy of the weights in this process, in a second
process, or on servers.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import torch
from transformers import PreTrainedModel

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.client import EngineClient
from skyrl_train.inference_engines.http import find_host, server_url
from skyrl_train.inference_engines.process import start_engine
from skyrl_train.launch.launcher import MakeEngine, Sinks, holding_devices, with_transport
from skyrl_train.launch.lease import Lease
from skyrl_train.launch.numa import bind_to_gpu
from skyrl_train.launch.process import LocalRank, RankHost
from skyrl_train.models.loading import default_device
from skyrl_train.types.specs import ModelSpec, SyncKind, World
from skyrl_train.weight_sync import SyncOptions, WeightSync
from skyrl_train.weight_sync.sync import free_port
from skyrl_train.workers.group import WorkerGroup


class InlineLauncher:
    """A launcher for one device. All models compute in the single thread of `executor`."""

    def __init__(
        self,
        executor: Executor,
        sync: SyncOptions | None = None,
        servers: Sequence[str] = (),
        *,
        offloads_idle: bool = False,
        frees_cache: bool = False,
        has_engine_process: bool = False,
    ) -> None:
        """Create the launcher. `sync` is how to send weights to a second process or to the addresses of `servers`.

        `has_engine_process` starts the engine in a second process. `offloads_idle` offloads idle models and the engine
        from the device. The engine must then have its own weights. `frees_cache` releases the key-value cache of an
        engine that shares the policy's weights while models compute.
        """
        self._executor = executor
        self._has_engine_process = has_engine_process
        self._sync = sync or SyncOptions()
        self._servers = servers
        self._lease = Lease(moves_models=offloads_idle) if offloads_idle or frees_cache else None
        self.device = default_device()
        self.policy: PreTrainedModel | None = None
        self._rank: LocalRank | None = None

    async def start(self) -> None:
        loop, world = asyncio.get_running_loop(), World(device=str(self.device))
        # On a GPU, this binds the compute thread to the cores of its NUMA node, and with it all threads that it starts:
        # OpenMP, the backward pass, checkpoints. Models are loaded and pinned memory is allocated in these threads.
        # Environments keep all cores. An engine in this process computes in the same thread.
        self._rank = LocalRank(self._executor, await loop.run_in_executor(self._executor, RankHost, world))

    async def load(self, spec: ModelSpec, objective: Objective | None) -> WorkerGroup:
        assert self._rank is not None, "start() comes first"
        group = WorkerGroup(spec, [self._rank], objective)
        await group.load()
        if spec.role == "policy" and not self._has_engine_process:
            self.policy = self._rank.host.workers["policy"].module.hf_model
        if self._lease is not None:
            await self._lease.add_model(group)
        return group

    async def start_engine(self, make_engine: MakeEngine, start_timeout_s: float) -> InferenceEngine:
        if self._has_engine_process:

            async def start(_index: int) -> InferenceEngine:
                make = partial(make_beside_gpu, make_engine)
                return await start_engine(make, start_timeout_s=start_timeout_s)

            return EngineClient([await start(0)], start)
        engine = make_engine(self.policy)
        if self._lease is None:
            return engine
        client = EngineClient([engine], enter=self._lease.enter_engine)
        self._lease.add_engine(client)
        return client

    def bytes_beside_engine(self, n_bytes: int) -> int:
        moves_models = self._lease is not None and self._lease.moves_models
        return 0 if moves_models and self.device.type == "cuda" else n_bytes

    def weight_sync(
        self, source: WorkerGroup, sinks: Sinks, kind: SyncKind = "full", dtype: torch.dtype | None = None
    ) -> WeightSync:
        has_receivers = self._has_engine_process or bool(self._servers)
        if not has_receivers or any(isinstance(sink, WorkerGroup) for sink in sinks.values()):
            options = SyncOptions(timeout_s=self._sync.timeout_s)
            return WeightSync(source, sinks, options, kind=kind, holding_devices=holding_devices(self._lease, sinks))
        options = with_transport(self._sync, self.device, shares_devices=self._has_engine_process)
        find_address = self._find_address if self._servers else None
        return WeightSync(source, sinks, options, find_address=find_address, kind=kind, dtype=dtype)

    async def _find_address(self) -> str:
        """Return a free "host:port" on this machine that all servers can reach."""
        hosts = [find_host(server_url(server)) for server in self._servers]
        host = next((host for host in hosts if not host.startswith("127.")), hosts[0])
        return f"{host}:{free_port(host)}"

    async def close(self) -> None:
        if self._lease is not None:
            await self._lease.close()
        if self._rank is not None:
            await self._rank.close()


def make_beside_gpu(make_engine: MakeEngine) -> InferenceEngine:
    """Make an engine with its own weights. On a GPU, it runs on the cores of the GPU's NUMA node."""
    if default_device().type == "cuda":
        bind_to_gpu()
    return make_engine(None)
