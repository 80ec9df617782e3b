"""Scripts in their `--tiny` form, with other settings than `make test` has: `make test-recipes`."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from veritas_kit.recipes import Recipes

SKYRL_TRAIN = Path(__file__).parents[3] / "skyrl-train"
SGLANG = """
import runpy, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests/kit"]
runpy.run_module("train_kit.sglang_server", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "variables"),
    [
        ("lgc-v2-SFT-trainer.sh", {"gpu_count": "2"}),
        ("lgc-v2-GRPO-trainer.sh", {"ENABLE_LORA": "1"}),
        ("lgc-v2-RL-GRPO-trainer.sh", {"ROLLOUT_BACKEND": "hf", "FSDP_STRATEGY": "fsdp2"}),
        ("openspiel-ppo-trainer.sh", {"ENABLE_LORA": "0"}),
        ("openspiel-ppo-trainer.sh", {"GAME_TYPES": "hex"}),
        ("openspiel-ppo-trainer.sh", {"GAME_TYPES": "leduc_poker,pig", "LAYERED_SUMMON": "1"}),
        ("merge.sh", {}),
    ],
)
def test_the_tiny_form_runs(script: str, variables: dict[str, str], recipes: Recipes) -> None:
    result = recipes.run(script, "--tiny", **variables)
    assert result.returncode == 0, result.stderr
    if script == "merge.sh":
        target = recipes.root / "train/merged_model_tiny"
        assert (target / "lora_adapter/adapter_model.safetensors").is_file()
        assert (target / "model.safetensors").is_file()


@pytest.mark.parametrize("script", ["lgc-v2-SFT-trainer.sh", "merge.sh"])
def test_two_tiny_forms_run_at_once(script: str, recipes: Recipes) -> None:
    """One shell sources both, so that they have the same `$$`."""
    for name in ("models/tiny-sft", "parquet_tiny"):
        shutil.rmtree(recipes.root / "train" / name, ignore_errors=True)
    command = f". train/scripts/{script} --tiny"
    lines = f"{command} & first=$!\n{command} & second=$!\nwait $first; echo $?; wait $second; echo $?"
    result = recipes.shell(["bash", "-c", lines])
    assert result.stdout.splitlines()[-2:] == ["0", "0"], result.stderr
    assert not [path for path in (recipes.root / "train").glob("**/*.??????") if path.is_dir()]


def test_sglang_plays_the_rollouts(recipes: Recipes, tmp_path: Path) -> None:
    """A server with SGLang's API takes the place of SGLang, which needs a GPU."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SGLANG.format(root=str(SKYRL_TRAIN)))
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    options = ["trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.test_freq=-1"]
    result = recipes.run("openspiel-ppo-trainer.sh", "--tiny", *options, ROLLOUT_BACKEND="sglang", PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    assert "generator.backend=sglang" in result.stderr
    assert "step 1/1 · reward" in result.stderr
