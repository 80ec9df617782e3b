"""Metrics as text on the terminal, one line per prefix."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import groupby
from typing import TextIO

from tqdm import tqdm


class ConsoleTracker:
    """Writes each step's metrics to `stream` (standard output), above the progress line where there is one."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        tqdm.write(format_metrics(metrics, step), file=self._stream or sys.stdout)

    def truncate_after(self, step: int) -> None:
        """What was printed stays printed."""

    def close(self) -> None:
        """The stream belongs to the caller."""


def format_metrics(metrics: Mapping[str, float], step: int) -> str:
    """`step 3`, then a line per metric prefix: `  policy       grad_norm 0.41 · policy_kl 0.002`."""
    lines = [f"step {step}"]
    for prefix, names in groupby(sorted(metrics), key=lambda name: name.rpartition("/")[0]):
        values = " · ".join(f"{name.rpartition('/')[2]} {metrics[name]:.4g}" for name in names)
        lines.append(f"  {prefix:<12} {values}")
    return "\n".join(lines)
