"""The conditions of a measurement: date, commit and hardware."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from pathlib import Path

import torch


def conditions() -> str:
    """Describe the conditions, for instance "2026-01-31, commit 1a2b3c4, AMD EPYC, 2 cores, 2 threads"."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    cpu = names[0] if names else platform.processor()
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{time.strftime('%Y-%m-%d')}, commit {commit.stdout.strip()}, {cpu}, {threads}"
