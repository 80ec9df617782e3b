"""How a model is spread over devices, and how its state gets on and off the disk."""

from skyrl_train.distributed.fsdp2 import FSDP2Strategy
from skyrl_train.distributed.single import SingleStrategy
from skyrl_train.distributed.strategy import DistributedStrategy, TrainState

__all__ = ["DistributedStrategy", "FSDP2Strategy", "SingleStrategy", "TrainState"]
