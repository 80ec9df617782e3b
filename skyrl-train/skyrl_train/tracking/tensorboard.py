"""Metrics as TensorBoard event files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker:
    """Writes to `log_dir`, or to the folder that the variable `TENSORBOARD_DIR` names."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = Path(os.environ.get("TENSORBOARD_DIR") or log_dir)
        self._writer = SummaryWriter(str(self.log_dir))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Start a new event file that tells TensorBoard to hide what the earlier ones hold after `step`."""
        self._writer.close()
        self._writer = SummaryWriter(str(self.log_dir), purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()
