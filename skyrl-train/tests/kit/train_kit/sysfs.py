"""A description of a machine with NUMA nodes, as the kernel gives it."""

import os
from pathlib import Path

GPU = "0000:3b:00.0"
MAX_CORE = max(os.sched_getaffinity(0))


def write_sysfs(sysfs: Path, node: int, cores: str) -> Path:
    """Describe a machine whose GPU belongs to `node`; node 1 has `cores`."""
    device, node_1 = sysfs / "bus/pci/devices" / GPU, sysfs / "devices/system/node/node1"
    for folder in (device, node_1):
        folder.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    (node_1 / "cpulist").write_text(f"{cores}\n")
    return sysfs
