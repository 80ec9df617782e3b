"""A copy of the recipes, in which scripts may write."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from recipe_shell import Recipes

from skyrl_gym.tasks import task_family
from skyrl_train.models.tiny import tiny_qwen3, train_tokenizer

VERITAS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Recipes:
    """A copy of the recipes, with the model of the full form: a tiny one with a long context."""
    root = tmp_path_factory.mktemp("workspace") / "veritas-rl"
    ignored = shutil.ignore_patterns(
        "artifacts", "models", "outputs", "parquet*", "merged_model*", "__pycache__", ".env"
    )
    shutil.copytree(VERITAS, root, ignore=ignored, symlinks=True)
    family = task_family("lgc-v2", {"task_types": ["operation"]})
    tokenizer = train_tokenizer(
        [[{"role": "user", "content": family.generate(family.block(i)[0]).prompt}] for i in range(20)]
    )
    for name in ("rhuanmatias/trained-top-sn120", "org/other"):
        folder = root / "train/models" / name
        tokenizer.save_pretrained(folder)
        tiny_qwen3(tokenizer, seed=0, context_length=32768).save_pretrained(folder)
    return Recipes(root)
