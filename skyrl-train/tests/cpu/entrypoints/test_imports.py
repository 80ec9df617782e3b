"""A training run imports no package that it may not need, and the number of its modules stays bounded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OPTIONAL = {
    "datasets",
    "matplotlib",
    "pandas",
    "plotly",
    "ray",
    "sglang",
    "skyrl_tx",
    "tensorboard",
    "tinker",
    "vllm",
    "wandb",
}
MAX_MODULES = 4_000  # 3,789 when this was written, most of them of torch and transformers


@pytest.mark.parametrize("module", ["skyrl_train.entrypoints.experiment", "examples.catch.learn"])
def test_a_training_run_imports_no_optional_package(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=True
    )
    modules = done.stdout.split()
    assert not OPTIONAL & set(modules)
    assert len(modules) <= MAX_MODULES


def test_garbage_collection_resumes_after_the_imports() -> None:
    code = (
        "import gc; from skyrl_train.entrypoints.main_base import BasePPOExp; "
        "print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "True"]
