"""The configuration package imports without training libraries."""

import subprocess
import sys

from train_kit.processes import TRAIN_FOLDER

HEAVY = {"torch", "ray", "transformers", "vllm", "sglang", "wandb", "datasets", "pyarrow"}
MODULES = "skyrl_train.config, skyrl_train.config.utils, skyrl_train.config.help, skyrl_train.algorithms"


def test_configuration_and_algorithms_import_no_training_library() -> None:
    """A command that only checks settings starts in a second."""
    code = f"import sys, {MODULES}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=TRAIN_FOLDER, capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())
