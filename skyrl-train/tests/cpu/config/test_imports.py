"""The configuration package imports without training libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "ray", "transformers", "vllm", "sglang", "wandb", "datasets", "pyarrow"}


@pytest.mark.parametrize(
    "module", ["skyrl_train.config", "skyrl_train.config.utils", "skyrl_train.config.generate", "skyrl_train.errors"]
)
def test_the_configuration_imports_no_training_library(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert not HEAVY & set(done.stdout.split())


def test_every_public_name_exists() -> None:
    from skyrl_train import config
    from skyrl_train.config.utils import get_default_config

    assert all(hasattr(config, name) for name in config.__all__)
    assert get_default_config is config.get_default_config
    assert (Path(config.config_dir) / "ppo_base_config.yaml").is_file()
