"""Reservation of a cluster's GPUs (or CPUs) for the models and engines of a run."""

import asyncio
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_train.errors import ConfigError

Kind = Literal["GPU", "CPU"]

TIMEOUT_VARIABLE = "SKYRL_RAY_PG_TIMEOUT_IN_S"
JOIN_TIMEOUT_VARIABLE = "SKYRL_RAY_JOIN_TIMEOUT_IN_S"
POLL_S = 1.0

SHARE = 0.2
"""Fraction of a GPU (or CPU) that Ray books for each process, so that policy, critic, reference and engine all fit."""


class DeviceRequest(NamedTuple):
    """A request for devices that several models share."""

    users: tuple[str, ...]  # ("policy", "ref")
    n_nodes: int
    n_per_node: int

    def describe(self, kind: Kind) -> str:
        """Format the request, e.g. "2 × 4 GPUs for policy, ref"."""
        return f"{self.n_nodes} × {_count(self.n_per_node, kind)} for {', '.join(self.users)}"


@dataclass(frozen=True, slots=True)
class Device:
    """One reserved GPU (or CPU)."""

    group: PlacementGroup
    bundle: int
    kind: Kind

    def options(self) -> dict[str, Any]:
        """Return Ray options that place an actor on this device."""
        options: dict[str, Any] = {
            "num_cpus": SHARE,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self.bundle),
        }
        return options | ({"num_gpus": SHARE} if self.kind == "GPU" else {})


async def find_visible_devices(devices: Sequence[Device]) -> str:
    """Return `CUDA_VISIBLE_DEVICES` for a process that uses several GPUs of one node, or "" on CPUs."""
    if devices[0].kind == "CPU":
        return ""
    ask = ray.remote(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    found = [ask.options(**device.options()).remote() for device in devices]
    return ",".join(await asyncio.gather(*found))


class Reservation:
    """The placement groups of a run: one per node of each request."""

    def __init__(self, requests: Sequence[DeviceRequest]) -> None:
        """Wait up to `$SKYRL_RAY_JOIN_TIMEOUT_IN_S` until enough nodes have joined. `wait` makes the reservation.

        Raise ConfigError if the cluster is too small, even if nothing else runs on it.
        """
        self._requests = list(requests)
        self._groups: dict[DeviceRequest, list[PlacementGroup]] = {}
        deadline = time.monotonic() + _read_seconds(JOIN_TIMEOUT_VARIABLE, 0)
        while True:
            self.kind: Kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
            is_late = time.monotonic() >= deadline
            if self._fits() and (self.kind == "GPU" or is_late):  # nodes with GPUs may still join
                break
            if is_late:
                raise ConfigError(
                    f"{self._describe_requests()}, but the Ray cluster has {_describe_nodes(self.kind)}. Lower "
                    "trainer.placement.policy_num_nodes, policy_num_gpus_per_node, generator.num_inference_engines or "
                    "inference_engine_tensor_parallel_size, add nodes with `ray start --address=<head node>`, or set "
                    f"${JOIN_TIMEOUT_VARIABLE} to wait for nodes that still start"
                )
            time.sleep(POLL_S)
        self.n_cluster_nodes = len(_devices_of_nodes(self.kind))

    async def wait(self) -> None:
        """Reserve all devices. Raise ConfigError if other programs do not release enough of them in time."""
        timeout_s = _read_seconds(TIMEOUT_VARIABLE, 180)
        deadline = time.monotonic() + timeout_s
        bundle = {"CPU": 1, self.kind: 1}
        for request in self._requests:
            self._groups[request] = [
                placement_group([bundle] * request.n_per_node, strategy="STRICT_PACK") for _ in range(request.n_nodes)
            ]
        for group in self._all_groups():
            while not await asyncio.to_thread(group.wait, POLL_S):
                if time.monotonic() < deadline:
                    continue
                free = ray.available_resources().get(self.kind, 0)
                self.release()
                raise ConfigError(
                    f"{self._describe_requests()}, and the Ray cluster did not free them within {timeout_s:g} s: of "
                    f"{_describe_nodes(self.kind)}, {free:g} more are free. Wait until "
                    f"other programs end, request fewer, or raise ${TIMEOUT_VARIABLE}"
                )

    def devices(self, user: str) -> list[Device]:
        """Return the devices of a model or an engine, grouped by node."""
        (request,) = (request for request in self._requests if user in request.users)
        return [
            Device(group, bundle, self.kind) for group in self._groups[request] for bundle in range(request.n_per_node)
        ]

    def release(self) -> None:
        """Release all devices."""
        for group in self._all_groups():
            remove_placement_group(group)
        self._groups.clear()

    def _all_groups(self) -> list[PlacementGroup]:
        return [group for groups in self._groups.values() for group in groups]

    def _fits(self) -> bool:
        """Return True if the cluster has enough devices, whether free or in use."""
        free = _devices_of_nodes(self.kind)
        for request in sorted(self._requests, key=lambda request: -request.n_per_node):
            for _ in range(request.n_nodes):
                free.sort()
                index = next((i for i, n in enumerate(free) if n >= request.n_per_node), None)
                if index is None:
                    return False
                free[index] -= request.n_per_node
        return True

    def _describe_requests(self) -> str:
        parts = ", ".join(request.describe(self.kind) for request in self._requests)
        return f"trainer.placement asks for {parts} (nodes × {self.kind}s per node)"


def _devices_of_nodes(kind: Kind) -> list[int]:
    """Return the number of devices per node. A GPU counts only if there is also a CPU for it."""
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sorted(int(min(of_node.get(kind, 0), of_node.get("CPU", 0))) for of_node in resources)


def _describe_nodes(kind: Kind) -> str:
    counts = _devices_of_nodes(kind)
    nodes = "1 node" if len(counts) == 1 else f"{len(counts)} nodes: {' + '.join(map(str, counts))}"
    lacks_cpus = sum(counts) < int(ray.cluster_resources().get(kind, 0))
    return f"{_count(sum(counts), kind)}{' with a CPU for each' if lacks_cpus else ''} on {nodes}"


def _read_seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ConfigError(f"{variable}={text} must be a number of seconds, such as 180")
    return seconds


def _count(n: int, kind: Kind) -> str:
    return f"{n} {kind}" if n == 1 else f"{n} {kind}s"
