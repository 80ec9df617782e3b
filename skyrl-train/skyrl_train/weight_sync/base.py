"""The plan of a weight sync, and the receipt that each end returns."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from skyrl_train.types.specs import SyncKind, TensorSpec

Transport = Literal["shared", "shared_memory", "gloo", "nccl", "cuda_ipc", "auto"]


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """Plan of one transfer of a model's weights, or of its adapter.

    `shared` passes references within one process, without a copy. All other transports send a stream of bytes from
    rank 0 of the model to `n_receivers` processes:

    shared_memory  through memory of the machine that all of them run on
    gloo           through the network
    auto           through memory to receivers on the sender's machine, through gloo to remote ones
    nccl           from GPU to GPU
    cuda_ipc       through GPU memory, to receivers on the model's GPUs, each from the rank on its GPU
    """

    version: int
    transport: Transport
    address: str  # "host:port" where the sender listens, or for `shared` the key of the references
    specs: tuple[TensorSpec, ...] = ()  # the tensors in order
    n_receivers: int = 1
    rank: int = 0  # 0 sends, 1 … n_receivers receive
    timeout_s: float = 300.0
    kind: SyncKind = "full"
    chunk_bytes: int = 1 << 24  # size of a piece of the stream (each end holds a few pieces at a time)
    has_checksum: bool = True  # False: receipts have the checksum 0
    tracks_changes: bool = False  # the sender keeps a copy of what it sends, so the next plan can send changes
    base_version: int | None = None  # send each tensor as its changes since this version, if that is shorter
    names: tuple[str, ...] = ()  # names of sender and receivers, for error messages

    def name(self, rank: int) -> str:
        """Return the name of the sender (rank 0) or of a receiver."""
        return self.names[rank] if self.names else f"receiver {rank}" if rank else "the sender"


class Receipt(NamedTuple):
    """Summary of what one end of a sync sent or received. All ends must agree."""

    version: int
    n_bytes: int
    checksum: int = 0  # checksum of the tensors' bits, 0 if nothing was copied
    n_sent: int = 0  # bytes of the stream, fewer than `n_bytes` if only changes were sent
