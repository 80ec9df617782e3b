"""All scripts in their `--tiny` form: `make test-recipes`."""

from __future__ import annotations

import pytest
from recipe_shell import Recipes


@pytest.mark.parametrize(
    ("script", "variables"),
    [
        ("lgc-v2-SFT-trainer.sh", {"gpu_count": "2"}),
        ("lgc-v2-GRPO-trainer.sh", {}),
        ("lgc-v2-RL-GRPO-trainer.sh", {"ROLLOUT_BACKEND": "hf", "FSDP_STRATEGY": "fsdp2"}),
        ("openspiel-ppo-trainer.sh", {"ENABLE_LORA": "0"}),
        ("openspiel-ppo-trainer.sh", {"GAME_TYPES": "leduc_poker,pig", "LAYERED_SUMMON": "1"}),
        ("merge.sh", {}),
        ("merge-ppo.sh", {"TARGET_DIR": "train/merged_model_mine"}),
    ],
)
def test_the_tiny_form_runs(script: str, variables: dict[str, str], recipes: Recipes) -> None:
    result = recipes.run(script, "--tiny", **variables)
    assert result.returncode == 0, result.stderr
    if script.startswith("merge"):
        target = recipes.root / variables.get("TARGET_DIR", "train/merged_model_tiny")
        assert (target / "lora_adapter/adapter_model.safetensors").is_file()
        assert (target / "model.safetensors").is_file()
