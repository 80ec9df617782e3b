"""What merge.sh and merge-ppo.sh merge, and where; `test_tiny.py` merges a checkpoint."""

from pathlib import Path

import pytest
from veritas_kit.recipes import Recipes


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The checkpoints of a run."""
    folder = tmp_path / "runs/run-1"
    (folder / "global_step_3").mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", ["run-1", "link to run-1"])
def test_the_folder_of_a_runs_checkpoints_is_merged(name: str, recipes: Recipes, run: Path) -> None:
    base = run.with_name(name)
    if base != run:
        base.symlink_to(run)
    result = recipes.run("merge.sh", "--dry-run", CHECKPOINT_BASE=str(base))
    assert f"would merge {base} into {recipes.root}/train/merged_model" in result.stderr
    result = recipes.run("merge.sh", "--dry-run", CHECKPOINT_BASE=str(base), GLOBAL_STEP="3")
    assert f"would merge {base}/global_step_3 into" in result.stderr


@pytest.mark.parametrize(("script", "name"), [("merge-ppo.sh", "runs"), ("merge.sh", "link to runs")])
def test_runs_that_have_checkpoints_are_named(
    script: str, name: str, recipes: Recipes, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "link to runs").symlink_to(run.parent)
    result = recipes.run(script, "--dry-run", CHECKPOINT_BASE=f"{tmp_path}/{name}")
    assert result.returncode == 1
    assert f"set CHECKPOINT_BASE to the folder of a run's checkpoints:\n{tmp_path}/{name}/run-1" in result.stderr


def test_a_missing_folder_of_checkpoints_is_named(recipes: Recipes) -> None:
    result = recipes.run("merge.sh", "--dry-run", CHECKPOINT_BASE="train/none")
    assert result.returncode == 1
    assert "train/none does not exist; set CHECKPOINT_BASE" in result.stderr


@pytest.mark.parametrize("flag", ["--tiny", "--dry-run"])
def test_the_target_may_end_with_a_slash(flag: str, recipes: Recipes, run: Path, tmp_path: Path) -> None:
    """A partial folder beside it would be within it otherwise."""
    variables = {"CHECKPOINT_BASE": str(run), "TARGET_DIR": f"{tmp_path}/merged/"}
    result = recipes.run("merge.sh", flag, "--dry-run", **variables)
    assert result.stderr.endswith(f" into {tmp_path}/merged\n")


@pytest.mark.parametrize("script", ["merge.sh", "merge-ppo.sh"])
def test_an_existing_target_is_kept(script: str, recipes: Recipes, tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    model.touch()
    for flags in (["--tiny"], ["--tiny", "--dry-run"], ["--dry-run"], []):
        result = recipes.run(script, *flags, TARGET_DIR=str(tmp_path))
        assert result.returncode == 1, result.stderr
        assert f"error: {tmp_path} already exists; set TARGET_DIR to a new folder" in result.stderr
        assert model.exists()


def test_a_dry_run_of_the_tiny_form_neither_deletes_nor_trains(recipes: Recipes) -> None:
    earlier = recipes.root / "train/merged_model_tiny/model.safetensors"
    earlier.parent.mkdir()
    earlier.touch()
    before = set(recipes.root.rglob("*"))
    result = recipes.run("merge.sh", "--tiny", "--dry-run", GLOBAL_STEP="50", CHECKPOINT_BASE="none")
    assert result.returncode == 0, result.stderr
    assert f"would train a tiny model and merge its checkpoint into {earlier.parent}" in result.stderr
    assert set(recipes.root.rglob("*")) == before
    earlier.unlink()
    earlier.parent.rmdir()
