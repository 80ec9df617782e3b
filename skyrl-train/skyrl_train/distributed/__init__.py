"""Strategies that shard a model over devices, and save and load its state."""

from skyrl_train.distributed.hugging_face import FSDP2Strategy, SingleStrategy
from skyrl_train.distributed.strategy import BASE_MODEL, METADATA, DistributedStrategy, Pass, TrainState
