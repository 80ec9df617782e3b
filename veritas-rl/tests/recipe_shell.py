"""Commands of the recipes, in a copy of `veritas-rl/`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SETTINGS = (
    *("WANDB_", "HF_TOKEN", "AGENT_", "LORA_", "ENABLE_", "LAYERED_", "FSDP_", "ROLLOUT_", "GAME_", "CHECKPOINT_"),
    *("GLOBAL_STEP", "TARGET_DIR", "dataset_path", "gpu_count", "IMAGE", "EXTRAS", "CUDA_VISIBLE_DEVICES"),
)
"""Prefixes of variables that the recipes read."""


@dataclass(frozen=True)
class Recipes:
    """A copy of `veritas-rl/`."""

    root: Path

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `bash train/scripts/<script>` as a user does, in the root of the copy."""
        return self.shell(["bash", f"train/scripts/{script}", *arguments], **variables)

    def shell(self, command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the root of the copy, without the machine's own settings of the recipes."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
        environment |= {
            "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HF_HUB_OFFLINE": "1",
            **variables,
        }
        return subprocess.run(
            command, cwd=self.root, env=environment, text=True, capture_output=True, timeout=280, check=False
        )
