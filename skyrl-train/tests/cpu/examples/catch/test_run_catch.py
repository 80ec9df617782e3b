"""`run_catch.sh`: its data and its engine, and a run with the overrides of the Catch guide."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from train_kit.example_scripts import record
from train_kit.processes import TRAIN_FOLDER, python
from train_kit.runs import Run

import skyrl_gym
from examples.catch.catch_dataset import CatchDataset, write_dataset
from examples.catch.main_catch import main

SCRIPT = ["bash", "examples/catch/run_catch.sh"]
GUIDE = [
    "generator.batched=true",
    "trainer.logger=tensorboard",
    "trainer.train_batch_size=64",
    "trainer.policy_mini_batch_size=16",
    "trainer.critic_mini_batch_size=16",
    "trainer.eval_batch_size=64",
    "generator.gpu_memory_utilization=0.4",
]


@pytest.mark.nightly
def test_the_commands_of_the_guide_train(tiny_model_path: Path, tmp_path: Path) -> None:
    write_dataset(CatchDataset(train_size=64, test_size=8), tmp_path)
    small = [
        f"trainer.policy.model.path={tiny_model_path}",
        f"trainer.output_dir={tmp_path}/outputs",
        "trainer.max_training_steps=1",
        "generator.n_samples_per_prompt=2",
    ]
    variables = {"DATA_DIR": str(tmp_path), "PYTHON": python(), "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        [*SCRIPT, *GUIDE, *small],
        cwd=TRAIN_FOLDER,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("No GPU here") == 1
    run = Run(tmp_path / "outputs/catch/catch_shaped")
    assert run.metrics[-1]["environment/avg_steps"] == 5, "batched rollouts play every turn"
    assert list((run.folder / "tensorboard").iterdir())


def test_data_is_prepared_unless_it_exists_or_is_named(tmp_path: Path) -> None:
    machine = {"has_gpu": True, "DATA_DIR": str(tmp_path)}
    (dataset, flags), (module, overrides) = record(SCRIPT, tmp_path, **machine, REWARD_MODE="episodic").modules
    assert dataset == "examples.catch.catch_dataset"
    assert flags == ["--output_dir", str(tmp_path), "--reward_mode", "episodic"]
    assert module == "examples.catch.main_catch"
    assert f"data.train_data=['{tmp_path}/train.parquet']" in overrides
    assert len(record([*SCRIPT, "data.train_data=mine.parquet"], tmp_path, **machine).modules) == 1
    (tmp_path / "train.parquet").touch()
    assert len(record(SCRIPT, tmp_path, **machine).modules) == 1


@pytest.mark.parametrize(("mode", "folder"), [("shaped", "catch"), ("episodic", "catch-episodic")])
def test_each_reward_mode_has_its_own_folder(mode: str, folder: str, tmp_path: Path) -> None:
    variables = {"HOME": str(tmp_path), "DATA_DIR": "", "REWARD_MODE": mode}
    _, overrides = record(SCRIPT, tmp_path, has_gpu=True, **variables).training
    assert f"data.train_data=['{tmp_path}/data/{folder}/train.parquet']" in overrides


@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_logger_and_the_agent_loop_by_default(has_gpu: bool, tmp_path: Path) -> None:
    """With a GPU, as in SkyRL, games are not batched by turn. A key of W&B selects it, and an override comes last."""
    data = {"DATA_DIR": str(tmp_path), "MODEL_DIR": str(tmp_path)}
    _, overrides = record(
        [*SCRIPT, "trainer.logger=console"], tmp_path, has_gpu=has_gpu, WANDB_API_KEY="x", **data
    ).training
    assert [item for item in overrides if item.startswith("trainer.logger")] == [
        "trainer.logger=wandb",
        "trainer.logger=console",
    ]
    batched = [item.rpartition("=")[2] for item in overrides if item.startswith("generator.batched")]
    assert batched[-1] == ("false" if has_gpu else "true")
    _, overrides = record(SCRIPT, tmp_path, has_gpu=has_gpu, WANDB_API_KEY="", **data).training
    assert "trainer.logger=tensorboard" in overrides


def test_the_plan_is_printed(
    catch_run: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    skyrl_gym.envs.deregister("catch")  # the script registers it
    monkeypatch.setattr(sys, "argv", ["main_catch", *catch_run, "--dry-run"])
    main()
    assert "memory       3.88 MB for weights, gradients and optimizer" in capsys.readouterr().out
