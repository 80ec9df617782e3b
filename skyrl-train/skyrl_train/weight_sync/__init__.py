"""The transfer of new weights from the policy to engines and to the reference."""

from functools import partial
from typing import TYPE_CHECKING

from skyrl_train.absent import refuse_name
from skyrl_train.weight_sync.base import Receipt, SyncPlan
from skyrl_train.weight_sync.mirror import MirroredReceiver, WeightMirror
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
    "MirroredReceiver",
    "Receipt",
    "Receiver",
    "SyncOptions",
    "SyncPlan",
    "WeightMirror",
    "WeightSink",
    "WeightSource",
    "WeightSync",
    "send",
    "transport_between",
]


if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # for names that SkyRL's scripts import
