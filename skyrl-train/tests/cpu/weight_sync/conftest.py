"""Weights, and transports of GPUs that run on the CPU."""

import pytest
import torch
from train_kit.weight_sync import Tensors, random_tensors

from skyrl_train.weight_sync import stream


@pytest.fixture
def tensors() -> Tensors:
    return random_tensors([(5, 3), (2000,), (), (0, 4), (64, 65)])


@pytest.fixture
def gpus_are_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the slots of `nccl` and `cuda_ipc` on the CPU, where gloo and shared memory replace them."""
    monkeypatch.setattr(stream, "stream_device", lambda plan: torch.device("cpu"))
