"""The plan of a weight sync, and the receipt of each end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from skyrl_train.types.specs import SyncKind, TensorSpec

Transport = Literal["shared", "broadcast"]


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """One transfer of the weights of a model, or of its adapter.

    `shared` passes references within one process, without a copy. `broadcast` sends chunks from rank 0 of the model to
    `n_receivers` processes through gloo.
    """

    version: int
    transport: Transport
    address: str  # "host:port" of the sender's store; for `shared`, the key of the references
    chunks: tuple[tuple[TensorSpec, ...], ...] = ()  # one broadcast each
    n_receivers: int = 1
    rank: int = 0  # 0 sends, 1 … n_receivers receive
    timeout_s: float = 600.0
    kind: SyncKind = "full"


class Receipt(NamedTuple):
    """A summary of what one end of a sync sent or received; all ends must agree."""

    version: int
    n_bytes: int
    checksum: int = 0  # of the tensors' bits; 0 if nothing was copied
