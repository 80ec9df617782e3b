"""A run as its callbacks see it, whatever trains."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from skyrl_train.config import SkyRLConfig


class Run(Protocol):
    """One training run."""

    @property
    def cfg(self) -> SkyRLConfig:
        """The resolved configuration."""
        ...

    @property
    def global_step(self) -> int:
        """The last step that was finished; 0 before the first."""
        ...

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        ...

    @property
    def is_stopping(self) -> bool:
        """True once somebody has asked the run to stop."""
        ...

    def request_stop(self, reason: str) -> None:
        """Stop after the current step, with a checkpoint of it."""
        ...

    async def save_checkpoint(self) -> None:
        """Write a checkpoint of the last step, complete or not at all."""
        ...

    async def check_space(self) -> None:
        """Raise CheckpointError if the disk has no room for a checkpoint beside the last one."""
        ...

    async def export(self, folder: Path) -> None:
        """Write the models as plain Hugging Face folders into `folder`, complete or not at all."""
        ...
