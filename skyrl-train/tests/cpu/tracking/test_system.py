import mmap
import time

import pytest
import torch

from skyrl_train.tracking.system import peak_flops, system_metrics


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce GTX 1080", None),
        (None, None),  # a CPU
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name(
    name: str | None, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: name is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert peak_flops() == peak


def test_busy_cores_and_memory_are_measured() -> None:
    system_metrics()
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        pass
    before = system_metrics()
    assert 0 < before["system/cpu_utilization"] <= 100
    block = mmap.mmap(-1, 100_000_000)  # new pages; an allocation may reuse freed memory
    for offset in range(0, len(block), mmap.PAGESIZE):
        block[offset] = 1
    assert system_metrics()["system/memory_usage"] - before["system/memory_usage"] == pytest.approx(0.1, abs=0.02)
    block.close()
