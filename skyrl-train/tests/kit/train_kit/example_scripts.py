"""The example scripts `run_*.sh` up to the start of training, on a machine with or without a GPU and vLLM."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from train_kit.processes import TRAIN_FOLDER

RECORDER = """#!/usr/bin/env bash
# Takes the place of Python: tells whether there is a GPU and vLLM, prints the recipe, and records other arguments.
case "$*" in
  -c*cuda*) exit $((1 - HAS_GPU)) ;;
  -c*vllm*) exit $((1 - HAS_VLLM)) ;;
  -c*wandb*) exit 0 ;;
  "-m examples.catch.recipe") printf '%s\\n' "$RECIPE" ;;
  *) printf '%s\\n' "$@" >>"$RECORD" ;;
esac
"""


@dataclass(frozen=True)
class Recording:
    """What a script printed, and the modules that it ran with their arguments."""

    output: str
    modules: list[tuple[str, list[str]]]

    @property
    def training(self) -> tuple[str, list[str]]:
        """The last module, which trains, and its arguments."""
        return self.modules[-1]


def record(
    command: Sequence[str], folder: Path, *, has_gpu: bool = False, has_vllm: bool = False, **variables: str
) -> Recording:
    """Run a command in skyrl-train, whose Python only records; write files into `folder`."""
    python, records = folder / "python", folder / "record"
    python.write_text(RECORDER)
    python.chmod(0o755)
    records.write_text("")
    facts = {
        "PYTHON": str(python),
        "RECORD": str(records),
        "HAS_GPU": str(int(has_gpu)),
        "HAS_VLLM": str(int(has_vllm)),
    }
    finished = subprocess.run(
        command, cwd=TRAIN_FOLDER, env=os.environ | facts | variables, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    recorded = [part.splitlines() for part in records.read_text().split("-m\n")[1:]]
    return Recording(finished.stdout, [(module, arguments) for module, *arguments in recorded])
