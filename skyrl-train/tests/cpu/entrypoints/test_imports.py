"""A training run imports no package that it may not need, and the number of its modules stays bounded."""

import subprocess
import sys

from train_kit.processes import TRAIN_FOLDER

OPTIONAL = {"datasets", "matplotlib", "pandas", "plotly", "ray", "sglang", "skyrl_tx"}
OPTIONAL |= {"tensorboard", "tinker", "vllm", "wandb"}
MAX_MODULES = 4_200  # about 4,000, most of them of torch and transformers
IMPORT = """
import gc, sys
from skyrl_train.entrypoints.main_base import BasePPOExp
print(*sys.modules)
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
import examples.catch.learn
print(*sys.modules)
"""


def test_a_training_run_imports_no_optional_package_and_collects_garbage_afterwards() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], cwd=TRAIN_FOLDER, capture_output=True, text=True, timeout=250, check=True
    )
    experiment, garbage_collection, example = done.stdout.splitlines()
    for modules in (experiment.split(), example.split()):
        assert not OPTIONAL & set(modules)
        assert len(modules) <= MAX_MODULES
    assert garbage_collection == "True True", "it is enabled again, and skips what was imported"
