"""The processes of a run on a Ray cluster."""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import ray
import torch
from transformers import PreTrainedModel

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.config.problems import raise_problems
from skyrl_train.config.run import RunPlacementConfig
from skyrl_train.config.trainer import PlacementConfig
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.client import EngineClient
from skyrl_train.launch.launcher import MakeEngine, Sinks, holding_devices, with_transport
from skyrl_train.launch.lease import Lease
from skyrl_train.launch.ray.actors import RayRank, connect_engine, start_engine_actor
from skyrl_train.launch.ray.cluster import connect
from skyrl_train.launch.ray.placement import Device, DeviceRequest, Reservation, find_visible_devices
from skyrl_train.launch.timeouts import find_long_sync
from skyrl_train.types.specs import ModelSpec, Role, SyncKind, World
from skyrl_train.weight_sync import SyncOptions, WeightSync
from skyrl_train.workers.group import WorkerGroup

logger = logging.getLogger(__name__)

ENGINE = "engine"


class RayLauncher:
    """A launcher whose ranks and engines are Ray actors on reserved devices."""

    policy: PreTrainedModel | None = None

    def __init__(
        self,
        placement: RunPlacementConfig,
        roles: Sequence[Role],
        sync: SyncOptions | None,
        *,
        n_engines: int,
        engine_size: int = 1,
    ) -> None:
        """Connect to the cluster. Raise ConfigError if it does not answer or is too small. Call `start` next.

        `placement` has the number of devices of each model in `roles`, and `engine_size` is the number for each engine.
        `sync` is None if no weights are sent between models and engines.
        """
        self._placement = placement
        self._roles = roles
        self._sync = sync
        self._ranks: dict[Role, list[RayRank]] = {}
        self._n_engines, self._engine_size = n_engines, engine_size
        self._engines: list[Any] = []
        self._groups: dict[WorkerGroup, RayRank] = {}  # first rank of each group
        self._has_connected = connect()
        self._requests = list_requests(placement, roles, n_engines, engine_size)
        try:
            self._reservation = Reservation(self._requests)
        except BaseException:
            self._disconnect()
            raise
        has_gpus = self._reservation.kind == "GPU"
        self.device = torch.device("cuda" if has_gpus else "cpu")
        self._lease = Lease() if n_engines and placement.offloads_idle(has_gpus) else None

    async def start(self) -> None:
        """Reserve the devices and start the processes. Raise ConfigError if the devices are not free in time."""
        await self._reservation.wait()
        for request in self._requests:
            logger.info("Reserved %s", request.describe(self._reservation.kind))
        for role in self._roles:
            devices = list(enumerate(self._reservation.devices(role)))
            worlds = [World(rank, len(devices), str(self.device)) for rank, _ in devices]
            self._ranks[role] = [RayRank(role, worlds[rank], device) for rank, device in devices]
        first_devices = [self._engine_devices(index)[0] for index in range(self._n_engines)]
        self._engines = [start_engine_actor(device.options()) for device in first_devices]

    def _engine_devices(self, index: int) -> list[Device]:
        """Return an engine's devices, all on one node. They are part of the policy's devices or separate ones."""
        if not self._placement.shares_devices:
            return self._reservation.devices(_engine_name(index, self._n_engines))
        _, n_per_node = self._placement.size("policy")
        node, slot = divmod(index, n_per_node // self._engine_size)
        start = node * n_per_node + slot * self._engine_size
        return self._reservation.devices(ENGINE)[start : start + self._engine_size]

    async def load(self, spec: ModelSpec, objective: Objective | None) -> WorkerGroup:
        ranks = self._ranks[spec.role]
        _, n_per_node = self._placement.size(spec.role)
        address, n_processes = await ranks[0].find_address(), self._n_processes_per_node(n_per_node)
        timeouts = await asyncio.gather(*(rank.join(address, n_processes) for rank in ranks))
        if spec.role == "policy" and len(ranks) > 1 and self._sync is not None:
            raise_problems(find_long_sync(self._sync.timeout_s, min(timeouts)))
        group = WorkerGroup(spec, ranks, objective)
        await group.load()
        self._groups[group] = ranks[0]
        if self._lease is not None:
            await self._lease.add_model(group)
        return group

    async def start_engine(self, make_engine: MakeEngine, start_timeout_s: float) -> InferenceEngine:
        n_per_node = math.ceil(self._n_engines * self._engine_size / self._reservation.n_cluster_nodes)

        async def connect(index: int) -> InferenceEngine:
            return await connect_engine(
                self._engines[index],
                partial(make_engine, None),
                start_timeout_s,
                n_processes=self._n_processes_per_node(n_per_node),
                visible_devices=find_visible_devices(self._engine_devices(index)),
            )

        async def restart(index: int) -> InferenceEngine:
            self._engines[index] = start_engine_actor(self._engine_devices(index)[0].options())
            return await connect(index)

        engines = await asyncio.gather(*map(connect, range(self._n_engines)))
        if self._lease is None:
            return EngineClient(engines, restart)
        client = EngineClient(engines, restart, self._lease.enter_engine)
        self._lease.add_engine(client)
        return client

    def bytes_beside_engine(self, n_bytes: int) -> int:
        if self._reservation.kind == "CPU":
            return n_bytes // self._reservation.n_cluster_nodes
        if self._lease is not None:
            return 0
        n_nodes, n_per_node = self._placement.size("policy")
        return n_bytes // (n_nodes * n_per_node) if self._placement.shares_devices else 0

    def weight_sync(
        self, source: WorkerGroup, sinks: Sinks, kind: SyncKind = "full", dtype: torch.dtype | None = None
    ) -> WeightSync:
        assert self._sync is not None, "the run sends no weights"
        shares_devices = self._placement.shares_devices and self._n_engines > 0
        sends_changes = self._sync.sends_changes
        if any(sink in self._groups for sink in sinks.values()):  # the receiver is the reference
            shares_devices = any({"policy", "ref"} <= {*request.users} for request in self._requests)
            sends_changes = False  # the policy keeps only one copy of sent weights, for the engines
        options = with_transport(self._sync, self.device, shares_devices=shares_devices)
        return WeightSync(
            source,
            sinks,
            replace(options, sends_changes=sends_changes),
            find_address=self._groups[source].find_address,
            kind=kind,
            dtype=dtype,
            holding_devices=holding_devices(self._lease, sinks),
        )

    async def close(self) -> None:
        """End all ranks and release the devices."""
        if self._lease is not None:
            await self._lease.close()
        await asyncio.gather(*(rank.close() for ranks in self._ranks.values() for rank in ranks))
        for engine in self._engines:
            ray.kill(engine)
        self._reservation.release()
        self._disconnect()

    def _n_processes_per_node(self, n_at_once: int) -> int:
        """Return the number of processes that compute concurrently on a node. Models that share devices take turns."""
        if self._placement.shares_devices:
            return n_at_once
        n_processes = sum(request.n_nodes * request.n_per_node for request in self._requests)
        return math.ceil(n_processes / self._reservation.n_cluster_nodes)

    def _disconnect(self) -> None:
        if self._has_connected:
            ray.shutdown()


def list_requests(
    placement: RunPlacementConfig, roles: Sequence[Role], n_engines: int, engine_size: int = 1
) -> list[DeviceRequest]:
    """Return the device requests of a run: one for each set of models and engines that share devices."""
    if placement.shares_devices:
        return [DeviceRequest((*roles, *([ENGINE] if n_engines else [])), *placement.size("policy"))]
    assert isinstance(placement, PlacementConfig), "other runs have one model"
    shared: dict[Role, tuple[Role, ...]] = {role: (role,) for role in get_args(Role) if role in roles}
    if placement.colocate_policy_ref and "ref" in roles:
        shared["policy"] = ("policy", shared.pop("ref")[0])
    requests = [DeviceRequest(names, *placement.size(role)) for role, names in shared.items()]
    return [
        *requests,
        *(DeviceRequest((_engine_name(index, n_engines),), 1, engine_size) for index in range(n_engines)),
    ]


def _engine_name(index: int, n_engines: int) -> str:
    return ENGINE if n_engines == 1 else f"{ENGINE} {index + 1}"
