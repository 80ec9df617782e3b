"""The recipes in their `--tiny` form, from data to a merged model; `tests/recipes/` has the other scripts."""

import json
from pathlib import Path

import pytest
from train_kit.runs import Run
from veritas_kit.recipes import Recipes


def find_run(recipes: Recipes, name: str) -> Run:
    """Return the newest run whose name begins so; its folder is dated."""
    return Run(max(recipes.root.glob(f"train/outputs/20*-*-*/*-*-*/*/{name}*/metrics.jsonl")).parent)


@pytest.mark.nightly
def test_sourced_supervised_fine_tuning(recipes: Recipes) -> None:
    result = recipes.shell(["bash", "-c", ". train/scripts/lgc-v2-SFT-trainer.sh --tiny; echo status $?"])
    assert "status 0" in result.stdout, result.stderr
    steps = find_run(recipes, "tiny-sft-").metrics
    assert len(steps) == 10
    assert steps[-1]["val/loss"] < steps[4]["val/loss"]
    names = {"train/loss", "train/learning_rate", "train/epoch", "train/global_step", "train/throughput"}
    assert names | {"system/memory_usage"} <= steps[0].keys()
    checkpoints = list(recipes.root.glob("train/artifacts/checkpoints/tiny-sft-*-batch_size-8/global_step_*"))
    assert {path.name for path in checkpoints} == {"global_step_5", "global_step_10"}
    run_id = (checkpoints[0].parent / "wandb_run_id.txt").read_text()
    assert list(recipes.root.glob(f"train/artifacts/wandb/Qwen3-4B-Instruct-SFT-20*/wandb/*/run-{run_id}.wandb"))


@pytest.mark.nightly
def test_grpo_on_puzzles(recipes: Recipes) -> None:
    result = recipes.run("lgc-v2-GRPO-trainer.sh", "--tiny")
    assert result.returncode == 0, result.stderr
    steps = [step for step in find_run(recipes, "tiny-operation-").metrics if step["step"] > 0]
    assert [step["train/global_step"] for step in steps] == [1, 2]
    assert all(step["generate/n_invalid"] == 0 for step in steps)
    assert steps[-1]["policy/grad_norm"] > 0
    assert list(recipes.root.glob("train/artifacts/RL/checkpoints/tiny-operation-*-batch_size-8/global_step_2/policy"))


SMALLER = [
    "trainer.total_training_steps=2",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "trainer.logger=console",
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "+data.custom_cls.config.num_val_tasks=16",
]
"""Overrides that shorten the tiny run of OpenSpiel, of which `tests/recipes/` runs the whole."""


@pytest.fixture(scope="module")
def openspiel(recipes: Recipes) -> Path:
    """The checkpoints of a tiny run."""
    result = recipes.run("openspiel-ppo-trainer.sh", "--tiny", *SMALLER, WANDB_EXP="openspiel-1")
    assert result.returncode == 0, result.stderr
    return recipes.root / "train/artifacts/RL/checkpoints/openspiel-1"


def test_openspiel_trains_an_adapter(openspiel: Path, recipes: Recipes) -> None:
    steps = find_run(recipes, "openspiel-1").metrics
    assert [step["train/global_step"] for step in steps if step["step"] > 0] == [1, 2]
    assert 0 < steps[1]["policy/adapter_norm"] < steps[-1]["policy/adapter_norm"]
    assert steps[-1]["generate/n_invalid"] == 0
    assert (openspiel / "global_step_2/policy/lora_adapter/adapter_config.json").is_file()


def test_the_adapter_is_merged(openspiel: Path, recipes: Recipes) -> None:
    result = recipes.run("merge.sh", CHECKPOINT_BASE=str(openspiel), TARGET_DIR="train/merged_model_1")
    assert result.returncode == 0, result.stderr
    target = recipes.root / "train/merged_model_1"
    assert "of them changed" in result.stdout
    assert {path.name for path in (target / "lora_adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    base, merged = (
        json.loads((path / "config.json").read_text())
        for path in (recipes.root / "train/models/tiny-openspiel", target)
    )
    assert merged["hidden_size"] == base["hidden_size"]
    again = recipes.run("merge.sh", CHECKPOINT_BASE=str(openspiel), TARGET_DIR="train/merged_model_1")
    assert again.returncode == 1
    assert "already exists" in again.stderr


@pytest.mark.nightly
def test_the_tiny_form_of_a_merge_trains_first(recipes: Recipes) -> None:
    result = recipes.run("merge-ppo.sh", "--tiny", TARGET_DIR="train/merged_model_mine")
    assert result.returncode == 0, result.stderr
    files = {path.name for path in (recipes.root / "train/merged_model_mine").iterdir()}
    assert {"config.json", "model.safetensors", "lora_adapter"} <= files
    assert not list(recipes.root.glob("train/artifacts/RL/checkpoints/tiny-merge-*"))


def test_a_run_from_an_adapter_starts_where_it_stopped(openspiel: Path, recipes: Recipes) -> None:
    adapter = openspiel / "global_step_2/policy/lora_adapter"
    variables = {"LORA_ADAPTER_PATH": str(adapter), "WANDB_EXP": "openspiel-2"}
    more = [*SMALLER, "trainer.val_before_train=True", "trainer.total_training_steps=1"]
    result = recipes.run("openspiel-ppo-trainer.sh", "--tiny", *more, **variables)
    assert result.returncode == 0, result.stderr
    before, after = find_run(recipes, "openspiel-1").metrics[-1], find_run(recipes, "openspiel-2").metrics[0]
    assert after["step"] == 0
    assert after["eval/all/avg_score"] == before["eval/all/avg_score"]
    assert find_run(recipes, "openspiel-2").metrics[1]["policy/adapter_norm"] > 0.9 * before["policy/adapter_norm"]
