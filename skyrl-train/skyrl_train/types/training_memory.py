"""Bytes that a trained parameter takes: weights, gradients and optimizer state, on the device and in host memory."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from skyrl_train.config.policy import OptimizerName, TrainDtype

BLOCK_SIZE = 256
"""Number of values that share a scale in 8-bit moments."""

MIN_QUANTIZED_VALUES = 4096
"""Parameters with fewer values keep float32 moments."""

MIN_QUANTIZED_COLUMNS = 8
"""Parameters with a shorter last dimension keep float32 moments, because a scale takes 4 bytes."""

TYPICAL_SHAPE = (2048, 2048)
"""A parameter that stands for all parameters of a model if their shapes are unknown."""


@dataclass(frozen=True, slots=True)
class TrainingBytes:
    """Bytes of a trained parameter by part. Moments exist after the first step, gradients from backward to step."""

    weights: float
    gradients: float
    moments: float
    host_weights: float = 0
    """Float32 master weights in host memory."""
    host_gradients: float = 0
    host_moments: float = 0

    @property
    def on_device(self) -> float:
        """Bytes on the device during an update."""
        return self.weights + self.gradients + self.moments

    def scaled(self, factor: float) -> "TrainingBytes":
        """Return the bytes of `factor` times as many parameters."""
        return TrainingBytes(*(factor * value for value in astuple(self)))

    @property
    def in_checkpoint(self) -> float:
        """Bytes in a checkpoint: the weights, or their master copies, and the moments."""
        return (self.host_weights or self.weights) + self.moments + self.host_moments


def bytes_per_parameter(dtype: TrainDtype, optimizer: OptimizerName, *, cpu_offload: bool = False) -> TrainingBytes:
    """Return the bytes per trained parameter of a typical matrix, for a model whose shapes are unknown.

    >>> bytes_per_parameter("bfloat16", "adamw_8bit").on_device
    8.03125
    """
    whole = training_bytes(dtype, optimizer, cpu_offload=cpu_offload, shape=TYPICAL_SHAPE)
    return whole.scaled(1 / math.prod(TYPICAL_SHAPE))


def training_bytes(
    dtype: TrainDtype,
    optimizer: OptimizerName,
    *,
    cpu_offload: bool = False,
    shape: Sequence[int],
    is_hidden_matrix: bool = True,
) -> TrainingBytes:
    """Return the bytes of a trained parameter of `shape`.

    Gradients are float32. With `cpu_offload`, a gradient leaves the device as soon as it is complete, so the device
    holds one at a time, which is not counted. Muon has one moment of a hidden matrix, and two of all other parameters.
    """
    n = math.prod(shape)
    weights = n * (4 if dtype == "float32" else 2)
    if optimizer == "muon" and is_hidden_matrix and len(shape) == 2:
        moments = 4 * n
    elif optimizer == "adamw_8bit" and is_quantized(shape):
        moments = 2 * (n + 4 * math.prod(shape[:-1]) * count_blocks(shape))
    else:
        moments = 8 * n
    if cpu_offload:
        return TrainingBytes(weights, 0, 0, 4 * n, 4 * n, moments)
    return TrainingBytes(weights, 4 * n, moments)


def is_quantized(shape: Sequence[int]) -> bool:
    """Return True if `adamw_8bit` stores the moments of a parameter in 8 bits."""
    return len(shape) > 1 and shape[-1] >= MIN_QUANTIZED_COLUMNS and math.prod(shape) >= MIN_QUANTIZED_VALUES


def count_blocks(shape: Sequence[int]) -> int:
    """Return the number of blocks in the last dimension."""
    return math.ceil(shape[-1] / BLOCK_SIZE)
