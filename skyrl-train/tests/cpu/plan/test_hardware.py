from pathlib import Path

import psutil
import pytest

from skyrl_train.entrypoints.memory_plan import choose_hardware
from skyrl_train.errors import ConfigError
from skyrl_train.plan import hardware
from skyrl_train.plan.hardware import GIB, find_gpu, free_host_bytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("an accelerator", None),
    ],
)
def test_gpus_are_found_by_a_word_of_their_name(name: str, expected: str | None) -> None:
    gpu = find_gpu(name)
    assert (None if gpu is None else gpu.name) == expected


def test_a_gpu_that_is_not_known_needs_its_memory() -> None:
    with pytest.raises(ConfigError, match="--gpu TPU is not known; use one of A10, A100"):
        choose_hardware("TPU", None, None)
    assert choose_hardware("TPU", 16, None).device_bytes == 16 * GIB


def write(folder: Path, **values: str) -> None:
    folder.mkdir(parents=True)
    for name, value in values.items():
        (folder / f"memory.{name}").write_text(value)


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 has a hierarchy per controller, version 2 has one for all. Every ancestor may have a limit."""
    cgroups, own = tmp_path / "cgroup", tmp_path / "own"
    monkeypatch.setattr(hardware, "CGROUPS", cgroups)
    monkeypatch.setattr(hardware, "OWN_CGROUPS", own)
    free = psutil.virtual_memory().available
    assert free_host_bytes() == pytest.approx(free, rel=0.2)  # not Linux
    own.write_text("9:cpu:/job\n0::/job/step\n")
    write(cgroups / "job", max="3000", current="1500", stat="anon 10\ninactive_file 500\n")
    write(cgroups / "job/step", max="max", current="1000", stat="inactive_file 0\n")
    assert free_host_bytes() == 2000
    own.write_text("4:memory:/job\n")
    write(cgroups / "memory", limit_in_bytes="9223372036854771712", usage_in_bytes="1", stat="total_inactive_file 0\n")
    write(cgroups / "memory/job", limit_in_bytes="700", usage_in_bytes="900", stat="total_inactive_file 100\n")
    assert free_host_bytes() == 0
    own.write_text("4:memory:/docker/abc\n")  # of the host
    (cgroups / "memory/memory.limit_in_bytes").write_text("1001")
    assert free_host_bytes() == 1000
