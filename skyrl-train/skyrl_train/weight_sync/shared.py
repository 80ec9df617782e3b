"""Weight sync within one process: tensors are handed over, not copied."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from skyrl_train.weight_sync.base import Receipt, SyncPlan

_HANDED_OVER: dict[str, list[tuple[str, torch.Tensor]]] = {}


class SharedSender:
    """Lays out references to the model's own tensors under the plan's address."""

    def send(self, plan: SyncPlan, tensors: Iterator[tuple[str, torch.Tensor]]) -> Receipt:
        """See `Sender.send`."""
        listed = list(tensors)
        _HANDED_OVER[plan.address] = listed
        return Receipt(plan.version, _n_bytes(listed))


class SharedReceiver:
    """Reads the tensors where the sender laid them out. The sender must have finished."""

    receipt: Receipt

    def receive(self, plan: SyncPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Receiver.receive`."""
        listed = _HANDED_OVER[plan.address]
        self.receipt = Receipt(plan.version, _n_bytes(listed))
        yield from listed


def release(address: str) -> None:
    """Forget the references under an address."""
    _HANDED_OVER.pop(address, None)


def _n_bytes(tensors: list[tuple[str, torch.Tensor]]) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
