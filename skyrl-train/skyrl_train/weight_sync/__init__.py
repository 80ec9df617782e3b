"""The transfer of new weights from the policy to engines and to the reference."""

from skyrl_train.weight_sync.base import Receipt, SyncPlan
from skyrl_train.weight_sync.sync import (
    Receiver,
    SyncOptions,
    WeightSink,
    WeightSource,
    WeightSync,
    send,
    transport_between,
)

__all__ = [
    "Receipt",
    "Receiver",
    "SyncOptions",
    "SyncPlan",
    "WeightSink",
    "WeightSource",
    "WeightSync",
    "send",
    "transport_between",
]
