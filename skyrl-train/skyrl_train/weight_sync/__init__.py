"""How new weights get from the policy into engines, and into the reference."""

from skyrl_train.weight_sync.base import Receipt, Receiver, Sender, SyncPlan, receiver, sender
from skyrl_train.weight_sync.sync import WeightSink, WeightSource, WeightSync

__all__ = [
    "Receipt",
    "Receiver",
    "Sender",
    "SyncPlan",
    "WeightSink",
    "WeightSource",
    "WeightSync",
    "receiver",
    "sender",
]
