"""The recipes of `veritas-rl/`, run from a copy as a user runs them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from train_kit.processes import write_commands

from skyrl_gym.tasks import task_family
from skyrl_train.entrypoints.tiny import tiny_qwen3, train_tokenizer

VERITAS = Path(__file__).parents[3]
MODELS = ("rhuanmatias/trained-top-sn120", "org/other")
"""The models below `train/models`: the default of the recipes, and another."""
SETTINGS = (
    *("WANDB_", "HF_TOKEN", "AGENT_", "LORA_", "ENABLE_", "LAYERED_", "FSDP_", "ROLLOUT_", "GAME_", "CHECKPOINT_"),
    *("GLOBAL_STEP", "TARGET_DIR", "dataset_path", "gpu_count", "IMAGE", "EXTRAS", "CUDA_VISIBLE_DEVICES"),
)
"""Prefixes of variables that the recipes read."""


@dataclass(frozen=True)
class Recipes:
    """A copy of `veritas-rl/`, in which scripts may write."""

    root: Path
    commands: Path
    """Folder of the commands `python` and `skyrl`."""

    def run(
        self, script: str, *arguments: str, tools: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `bash train/scripts/<script>` in the root of the copy."""
        return self.shell(["bash", f"train/scripts/{script}", *arguments], tools, **variables)

    def shell(
        self, command: Sequence[str], tools: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the root of the copy, with none of this machine's settings of the recipes.

        `tools` is a folder of further commands.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
        folders = [str(folder) for folder in (tools, self.commands) if folder]
        environment |= {
            "PATH": os.pathsep.join([*folders, environment["PATH"]]),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HF_HUB_OFFLINE": "1",
            **variables,
        }
        return subprocess.run(
            command, cwd=self.root, env=environment, text=True, capture_output=True, timeout=280, check=False
        )

    def call(self, code: str, *arguments: str, tools: Path | None = None, **variables: str) -> list[str]:
        """Run code that uses the functions of common.sh, and return its output, split at NUL."""
        code = f". train/scripts/common.sh; {code}"
        result = self.shell(["bash", "-c", code, "bash", *arguments], tools, **variables)
        assert result.returncode == 0, result.stderr
        return result.stdout.split("\0")[:-1]

    def config(self, script: str, *arguments: str, tools: Path | None = None, **variables: str) -> dict[str, Any]:
        """Return the configuration that a script starts a run with: full keys, such as `trainer.epochs`."""
        result = self.run(script, *arguments, "--print-config", tools=tools, **variables)
        assert result.returncode == 0, result.stderr
        return read_config(result.stdout)

    @contextmanager
    def dotenv(self, text: str) -> Iterator[None]:
        """Add a .env file for the time of the context."""
        file = self.root / ".env"
        file.write_text(text)
        try:
            yield
        finally:
            file.unlink()


def copy_recipes(folder: Path) -> Recipes:
    """Copy the recipes into a folder, with a tiny model of a long context in place of each model."""
    root, commands = folder / "veritas-rl", folder / "commands"
    outputs = ("artifacts", "models", "outputs", "parquet*", "merged_model*", "__pycache__", ".env")
    shutil.copytree(VERITAS, root, ignore=shutil.ignore_patterns(*outputs), symlinks=True)
    commands.mkdir()
    write_commands(commands)
    family = task_family("lgc-v2", {"task_types": ["operation"]})
    prompts = [family.generate(family.block(i)[0]).prompt for i in range(20)]
    tokenizer = train_tokenizer([[{"role": "user", "content": prompt}] for prompt in prompts])
    for name in MODELS:
        model = root / "train/models" / name
        tokenizer.save_pretrained(model)
        tiny_qwen3(tokenizer, seed=0, context_length=32768).save_pretrained(model)
    return Recipes(root, commands)


def read_config(text: str) -> dict[str, Any]:
    """Return the values of a configuration in YAML by their full keys."""

    def flatten(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in section.items():
            if isinstance(value, dict):
                yield from flatten(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    return dict(flatten(yaml.safe_load(text)))


def write_tool(folder: Path, name: str, *lines: str) -> Path:
    """Write a command that takes the place of one that this machine lacks, and return its folder."""
    folder.mkdir(exist_ok=True)
    command = folder / name
    command.write_text("\n".join(["#!/bin/sh", *lines]))
    command.chmod(0o755)
    return folder
