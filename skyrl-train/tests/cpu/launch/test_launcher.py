import pytest
import torch

from skyrl_train.launch.launcher import with_transport
from skyrl_train.weight_sync import SyncOptions
from skyrl_train.weight_sync.base import Transport


@pytest.mark.parametrize(
    ("options", "device", "shares_devices", "expected"),
    [
        (SyncOptions("nccl"), "cuda", False, "nccl"),
        (SyncOptions("nccl"), "cuda", True, "cuda_ipc"),
        (SyncOptions("nccl"), "cpu", True, "auto"),
        (SyncOptions("cuda_ipc"), "cuda", True, "cuda_ipc"),
        (SyncOptions("cuda_ipc"), "cpu", False, "auto"),
        (SyncOptions("auto", prefers_gpus=True), "cuda", True, "cuda_ipc"),
        (SyncOptions("auto", prefers_gpus=True), "cuda", False, "nccl"),
        (SyncOptions("auto", prefers_gpus=True), "cpu", False, "auto"),
        (SyncOptions("auto"), "cuda", True, "auto"),
        (SyncOptions("gloo", prefers_gpus=True), "cuda", True, "gloo"),
    ],
)
def test_the_transport_follows_the_devices(
    options: SyncOptions, device: str, shares_devices: bool, expected: Transport
) -> None:
    assert with_transport(options, torch.device(device), shares_devices=shares_devices).transport == expected
