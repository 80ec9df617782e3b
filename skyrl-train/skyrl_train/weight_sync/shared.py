"""Weight sync within one process: pass tensors by reference, without a copy."""

from __future__ import annotations

from collections.abc import Generator, Iterable

import torch

from skyrl_train.weight_sync.base import Receipt, SyncPlan

_SENT: dict[str, list[tuple[str, torch.Tensor]]] = {}


def send_shared(plan: SyncPlan, tensors: Iterable[tuple[str, torch.Tensor]]) -> Receipt:
    """Store references to the model's own tensors under the plan's address."""
    _SENT[plan.address] = list(tensors)
    return _receipt(plan)


def receive_shared(plan: SyncPlan) -> Generator[tuple[str, torch.Tensor], None, Receipt]:
    """Yield the tensors that the sender stored. The sender must have finished."""
    yield from _SENT[plan.address]
    return _receipt(plan)


def release(address: str) -> None:
    """Drop the references that are stored under an address."""
    _SENT.pop(address, None)


def _receipt(plan: SyncPlan) -> Receipt:
    return Receipt(plan.version, sum(tensor.numel() * tensor.element_size() for _, tensor in _SENT[plan.address]))
