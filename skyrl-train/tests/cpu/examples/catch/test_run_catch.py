"""`run_catch.sh` with the overrides of the Catch guide, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.catch.catch_dataset import CatchDataset, write_dataset

TRAIN_FOLDER = Path(__file__).parents[4]
GUIDE = [
    "generator.batched=true",
    "trainer.logger=tensorboard",
    "trainer.train_batch_size=64",
    "trainer.policy_mini_batch_size=16",
    "trainer.critic_mini_batch_size=16",
    "trainer.eval_batch_size=64",
    "generator.gpu_memory_utilization=0.4",
]


def run_catch(data_dir: Path, *overrides: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"DATA_DIR": str(data_dir), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["bash", "examples/catch/run_catch.sh", *overrides],
        cwd=TRAIN_FOLDER,
        env=os.environ | environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.nightly
def test_the_commands_of_the_guide_train(tiny_model_path: Path, tmp_path: Path) -> None:
    write_dataset(CatchDataset(train_size=64, test_size=8), tmp_path)
    small = [
        f"trainer.policy.model.path={tiny_model_path}",
        f"trainer.output_dir={tmp_path}/outputs",
        "trainer.max_training_steps=1",
        "generator.n_samples_per_prompt=2",
    ]
    finished = run_catch(tmp_path, *GUIDE, *small)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("No GPU here") == 1
    folder = tmp_path / "outputs/catch/catch_shaped"
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["environment/avg_steps"] == 5, "batched rollouts play every turn"
    assert list((folder / "tensorboard").iterdir())


def gpu_commands(data_dir: Path, *overrides: str, **variables: str) -> list[str]:
    """Return the Python commands that the script runs on a machine with a GPU."""
    return run_catch(data_dir, *overrides, **{"PYTHON": "echo", **variables}).stdout.splitlines()


def test_vllm_samples_on_a_gpu_where_it_is_installed(tmp_path: Path) -> None:
    python = tmp_path / "python"
    for has_vllm, backend in ((True, "generator.backend=vllm"), (False, None)):
        python.write_text(f'#!/bin/sh\ncase "$2" in *vllm*) exit {int(not has_vllm)};; *) echo "$@";; esac\n')
        python.chmod(0o755)
        *_, message, command = gpu_commands(tmp_path, PYTHON=str(python))
        assert ("Sampling with vLLM" in message, "vLLM is not installed" in message) == (has_vllm, not has_vllm)
        assert (f" {backend}" in command) == has_vllm
        *_, command = gpu_commands(tmp_path, "generator.backend=hf", PYTHON=str(python))
        assert command.count("generator.backend=") == 1


def test_missing_data_is_prepared(tmp_path: Path) -> None:
    first, *_, last = gpu_commands(tmp_path, REWARD_MODE="episodic")
    assert first == f"-m examples.catch.catch_dataset --output_dir {tmp_path} --reward_mode episodic"
    assert last.startswith("-m examples.catch.main_catch ")
    assert f"data.train_data=['{tmp_path}/train.parquet']" in last


def test_existing_or_named_data_is_used(tmp_path: Path) -> None:
    assert not [line for line in gpu_commands(tmp_path, "data.train_data=mine.parquet") if "catch_dataset" in line]
    (tmp_path / "train.parquet").touch()
    assert not [line for line in gpu_commands(tmp_path) if "catch_dataset" in line]


def test_each_reward_mode_has_its_own_folder(tmp_path: Path) -> None:
    at_home = {"HOME": str(tmp_path), "DATA_DIR": ""}
    assert f"{tmp_path}/data/catch/train.parquet" in gpu_commands(tmp_path, **at_home)[-1]
    assert (
        f"{tmp_path}/data/catch-episodic/train.parquet" in gpu_commands(tmp_path, REWARD_MODE="episodic", **at_home)[-1]
    )
