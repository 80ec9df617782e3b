"""The plan of one weight sync, and the two ends that carry it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from skyrl_train.types.specs import TensorSpec

Transport = Literal["shared", "broadcast"]


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """One transfer of all weights of a model.

    `shared` hands over references within one process: nothing is copied on the way. `broadcast` sends chunks from
    rank 0 of the model to `n_receivers` processes through gloo.
    """

    version: int
    transport: Transport
    address: str  # "host:port" of the sender's store; of `shared`, the name of the hand-over
    chunks: tuple[tuple[TensorSpec, ...], ...] = ()  # one broadcast each
    n_receivers: int = 1
    rank: int = 0  # 0 sends, 1 … n_receivers receive
    timeout_s: float = 600.0


class Receipt(NamedTuple):
    """What one end of a sync has sent or received; all ends must agree."""

    version: int
    n_bytes: int
    checksum: int = 0  # of the tensors' bits; 0 where nothing was copied


class Sender(Protocol):
    """The sending end, on every rank of the model, since gathering is collective."""

    def send(self, plan: SyncPlan, tensors: Iterator[tuple[str, torch.Tensor]]) -> Receipt:
        """Send the tensors in the order of the plan."""
        ...


class Receiver(Protocol):
    """The receiving end, in every process that holds a copy of the weights."""

    receipt: Receipt
    """What was received; complete once `receive` is exhausted."""

    def receive(self, plan: SyncPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors. Each is valid until the next one is asked for."""
        ...


def sender(plan: SyncPlan) -> Sender:
    """Return the sending end of a plan's transport."""
    if plan.transport == "shared":
        from skyrl_train.weight_sync.shared import SharedSender

        return SharedSender()
    from skyrl_train.weight_sync.broadcast import BroadcastSender

    return BroadcastSender()


def receiver(plan: SyncPlan) -> Receiver:
    """Return the receiving end of a plan's transport."""
    if plan.transport == "shared":
        from skyrl_train.weight_sync.shared import SharedReceiver

        return SharedReceiver()
    from skyrl_train.weight_sync.broadcast import BroadcastReceiver

    return BroadcastReceiver()
