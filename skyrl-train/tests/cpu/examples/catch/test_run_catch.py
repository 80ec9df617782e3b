"""`run_catch.sh` with the overrides of the Catch guide, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def run_catch(data_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "examples/catch/run_catch.sh", *overrides],
        cwd=TRAIN_FOLDER,
        env=os.environ | {"DATA_DIR": str(data_dir), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


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


def test_missing_data_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    finished = run_catch(tmp_path)
    assert finished.returncode == 1
    assert f"{tmp_path}/train.parquet does not exist" in finished.stderr
    assert f"-m examples.catch.catch_dataset --output_dir {tmp_path}" in finished.stderr
