"""Strategies that shard a model over devices, and save and load its state."""

from skyrl_train.distributed.fsdp2 import FSDP2Strategy
from skyrl_train.distributed.hugging_face import SingleStrategy
from skyrl_train.distributed.strategy import BASE_MODEL, METADATA, DistributedStrategy, Pass, TrainState
