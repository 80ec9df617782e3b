"""Whole tensors for engines with their own weight layout, from syncs that send less than whole tensors.

Such an engine (vLLM fuses matrices, for example) can only load whole tensors under the policy's names. If a sync sends
only changes, or only the factors of an adapter, they are applied to a copy of the weights in host memory, the mirror.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from skyrl_train.errors import SyncError
from skyrl_train.models.low_rank import LEFT, RIGHT, MatrixChange, is_factor
from skyrl_train.types.specs import TensorSpec
from skyrl_train.weight_sync.base import SyncPlan
from skyrl_train.weight_sync.memory import SharedMemory, can_share_memory, open_memory
from skyrl_train.weight_sync.stream import pad_size
from skyrl_train.weight_sync.transfer import Receiver


class Peers(Protocol):
    """The processes that together hold an engine's weights and receive the same syncs."""

    rank_in_group: int
    world_size: int

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Return the object of the process `src`, in every process."""

    def barrier(self) -> None:
        """Wait until every process has called this."""


class WeightMirror:
    """The weights that the policy sent last, in memory that the peers on one machine share.

    Every peer writes into it. No lock is needed, because all of them write the same values.
    """

    def __init__(self, peers: Peers | None = None, device: torch.device | None = None) -> None:
        """Merge adapters on `device`, the CPU by default."""
        self.device = device or torch.device("cpu")
        self._peers = peers
        self._specs: tuple[TensorSpec, ...] = ()
        self.version: int | None = None  # version of all tensors, None while they are incomplete
        self.tensors: dict[str, torch.Tensor] = {}

    def prepare(self, plan: SyncPlan) -> dict[str, torch.Tensor]:
        """Return the tensors to receive a plan into, none if no later plan will need them.

        Raise SyncError if the plan continues from weights that were not received.
        """
        held, self.version = self.version, None
        if plan.kind == "factors" or plan.base_version is not None:
            is_held = held is not None and plan.base_version in (None, held)
            if not is_held or not set(plan.specs) <= set(self._specs):
                raise SyncError(
                    f"weight sync {plan.version} does not send all weights, but {plan.name(plan.rank)} does not hold "
                    "the others; send all of them first"
                )
        elif plan.transport == "shared" or (plan.kind == "full" and not plan.tracks_changes):
            self._specs, self.tensors = (), {}
        elif plan.specs != self._specs:
            self._specs, self.tensors = plan.specs, {}  # drop the old ones first: there may not be memory for both
            memory = allocate_host_memory(sum(pad_size(spec.n_bytes) for spec in plan.specs), self._peers)
            start = 0
            for spec in plan.specs:
                self.tensors[spec.name] = memory[start : start + spec.n_bytes].view(spec.dtype).view(spec.shape)
                start += pad_size(spec.n_bytes)
        return self.tensors


class MirroredReceiver(Receiver):
    """A receiver that yields every tensor of the model whole.

    Values that were not sent come from the mirror, and an adapter is merged. Tensors stay valid until the next sync.
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
        self._mirror.version = self._plan.version

    def _merge(self, name: str, tensor: torch.Tensor, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        if name + LEFT not in factors:
            return tensor
        return MatrixChange(factors[name + LEFT], factors[name + RIGHT]).apply(tensor.to(self._mirror.device))


def allocate_host_memory(n_bytes: int, peers: Peers | None) -> torch.Tensor:
    """Return host memory (n_bytes,) uint8, the same for all peers on a machine. All peers must call this together."""
    if peers is None or peers.world_size == 1 or not can_share_memory():
        return torch.empty(n_bytes, dtype=torch.uint8)
    memory: SharedMemory | None = None
    if peers.rank_in_group == 0:
        memory = SharedMemory.create(n_bytes)
        peers.broadcast_object(memory.address)
    else:
        memory = open_memory(peers.broadcast_object())
    peers.barrier()  # the address is valid only while peer 0 has the file open
    if memory is None:  # peer 0 is on another machine
        return torch.empty(n_bytes, dtype=torch.uint8)
    memory.close()
    return memory.buffer
