import mmap
import time

import pytest
import torch

from skyrl_train.timer import peak_memory
from skyrl_train.tracking.system import peak_flops, system_metrics


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
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


class NVMLError(Exception):
    """Like pynvml's errors, e.g. `NVMLError_NotSupported` of a slice of a GPU, which are no RuntimeErrors."""


@pytest.mark.parametrize("error", [None, NVMLError(), RuntimeError(), ModuleNotFoundError()])
def test_the_utilization_of_a_gpu_is_left_out_if_the_driver_does_not_report_it(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def utilization() -> int:
        if error is not None:
            raise error
        return 40

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2_000_000_000)
    monkeypatch.setattr(peak_memory, "highest", 0.0)  # of earlier tests
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    metrics = system_metrics()
    assert metrics["system/memory_usage"] == 2
    assert metrics.get("system/gpu_utilization") == (40 if error is None else None)
