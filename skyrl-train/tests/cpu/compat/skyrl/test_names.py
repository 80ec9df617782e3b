"""The modules and names that SkyRL's scripts import: those that exist here, and those that do not."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from train_kit import golden

from skyrl_train.compat.skyrl import names
from skyrl_train.compat.skyrl.absent import CLIENT_METHODS, EXPERIMENT_METHODS, MISSING_NAMES, MODULES, TRAINER_METHODS

GUIDE = Path(__file__).parents[5] / "docs/guides/coming-from-skyrl.md"


def test_names_that_scripts_import_exist() -> None:
    for module, (listed,) in golden.read("compat/skyrl_names").items():
        for name in listed.split():
            assert getattr(import_module(f"skyrl_train.{module}"), name) is not None


def test_a_module_without_a_file_names_one_for_python_m() -> None:
    """`python -m` makes it `sys.argv[0]`, and Ray reads the folder of the script from there."""
    for module in names.NAMES:
        spec = find_spec(f"skyrl_train.{module}")
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).is_file()


def test_names_and_methods_without_a_counterpart_are_in_the_guide() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    for module, missing in MISSING_NAMES.items():
        for name in missing:
            assert f"`{name}`" in guide, f"{module}.{name}"
    for module in MODULES:
        assert f"`{module}`" in guide
    for name in CLIENT_METHODS | EXPERIMENT_METHODS | TRAINER_METHODS:
        assert f"`{name}`" in guide


def test_modules_can_be_the_first_import_of_a_process() -> None:
    for name in (
        "compat.skyrl.keys",
        "compat.verl.keys",
        "compat.verl.command",
        "compat.skyrl.experiment",
        "config",
        "plan",
    ):
        subprocess.run([sys.executable, "-c", f"import skyrl_train.{name}"], check=True, timeout=100)
