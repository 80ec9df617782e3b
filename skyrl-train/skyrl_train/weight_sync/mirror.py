"""Whole tensors for engines that hold the weights in another layout, from syncs that send less than that.

Such an engine loads tensors under the policy's names. If a sync sends only what changed, or only the factors of an
adapter, they are applied to a copy of the weights in host memory, its mirror.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from skyrl_train.errors import SyncError
from skyrl_train.models.low_rank import LEFT, RIGHT, MatrixChange, is_factor
from skyrl_train.types.specs import TensorSpec
from skyrl_train.weight_sync.base import SyncPlan
from skyrl_train.weight_sync.shared_memory import SharedMemory, can_share_memory, open_memory
from skyrl_train.weight_sync.stream import pad_size
from skyrl_train.weight_sync.sync import Receiver


class Peers(Protocol):
    """The processes that together hold an engine's weights, and receive the same syncs."""

    rank_in_group: int
    world_size: int

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Return the object of the process `src`."""
        ...

    def barrier(self) -> None:
        """Wait for all of them."""
        ...


class WeightMirror:
    """The weights that a policy sent last, in memory that the peers on one machine share.

    Every peer writes into it. Since all of them write the same values, none waits for another.
    """

    def __init__(self, peers: Peers | None = None, device: torch.device | None = None) -> None:
        """Merge adapters on `device`, the CPU by default."""
        self.device = device or torch.device("cpu")
        self._peers = peers
        self._specs: list[TensorSpec] = []
        self._version: int | None = None  # that all tensors belong to
        self.tensors: dict[str, torch.Tensor] = {}

    def prepare(self, plan: SyncPlan) -> dict[str, torch.Tensor]:
        """Return the tensors to receive a plan into; none if no later plan will refer to them.

        Raises:
            SyncError: the plan continues from weights that were not received.
        """
        held, self._version = self._version, None
        if plan.kind == "factors" or plan.base_version is not None:
            is_held = held is not None and plan.base_version in (None, held)
            if not is_held or not set(plan.specs) <= set(self._specs):
                raise SyncError(
                    f"weight sync {plan.version} does not send all weights, but {plan.name(plan.rank)} does not hold "
                    "the others; send all of them first"
                )
        elif plan.transport == "shared" or (plan.kind == "full" and not plan.tracks_changes):
            self._specs, self.tensors = [], {}
        elif plan.specs != self._specs:
            self._specs, self.tensors = plan.specs, self._allocate(plan.specs)
        return self.tensors

    def complete(self, version: int) -> None:
        """Mark the tensors as those of a version."""
        self._version = version

    def _allocate(self, specs: list[TensorSpec]) -> dict[str, torch.Tensor]:
        """Return tensors in one block of memory."""
        self.tensors = {}  # first: the old ones may need as much memory
        memory = allocate_host_memory(sum(pad_size(spec.n_bytes) for spec in specs), self._peers)
        tensors, start = {}, 0
        for spec in specs:
            tensors[spec.name] = memory[start : start + spec.n_bytes].view(spec.dtype).view(spec.shape)
            start += pad_size(spec.n_bytes)
        return tensors


class MirroredReceiver(Receiver):
    """A receiver that yields all tensors of the model whole: values that were not sent are those of the mirror, and an
    adapter is merged.

    Tensors stay valid until the next sync.
    """

    def __init__(self, plan: SyncPlan, mirror: WeightMirror) -> None:
        super().__init__(plan, into=mirror.prepare(plan))
        self._mirror = mirror

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        stays_valid = bool(self._into) or self._plan.transport == "shared"
        factors: dict[str, torch.Tensor] = {}
        for name, tensor in super().__iter__():
            own = tensor if stays_valid else tensor.clone()
            if is_factor(name):
                factors[name] = own
            else:
                yield name, self._merge(name, own, factors)
        if self._plan.kind == "factors":
            for name, tensor in self._mirror.tensors.items():
                if not is_factor(name):
                    yield name, self._merge(name, tensor, factors)
        self._mirror.complete(self._plan.version)

    def _merge(self, name: str, tensor: torch.Tensor, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        if name + LEFT not in factors:
            return tensor
        return MatrixChange(factors[name + LEFT], factors[name + RIGHT]).apply(tensor.to(self._mirror.device))


def allocate_host_memory(n_bytes: int, peers: Peers | None) -> torch.Tensor:
    """Return host memory (n_bytes,) uint8. Peers on one machine, which must call this together, get the same memory."""
    if peers is None or peers.world_size == 1 or not can_share_memory():
        return torch.empty(n_bytes, dtype=torch.uint8)
    memory: SharedMemory | None = None
    if peers.rank_in_group == 0:
        memory = SharedMemory.create(n_bytes)
        peers.broadcast_object(memory.address)
    else:
        memory = open_memory(peers.broadcast_object())
    peers.barrier()  # the address is valid for as long as the first one has the file open
    if memory is None:  # on another machine
        return torch.empty(n_bytes, dtype=torch.uint8)
    memory.close()
    return memory.buffer
