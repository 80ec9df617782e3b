"""The batch under the module name that SkyRL's scripts import."""

from skyrl_train.types import TrainingBatch, TrainingInputBatch

__all__ = ["TrainingBatch", "TrainingInputBatch"]
