"""Modules of SkyRL's new layout have the names of `skyrl_train`."""

import subprocess
import sys
import tomllib
from importlib import import_module

import pytest
from train_kit import golden
from train_kit.processes import TRAIN_FOLDER


def test_a_module_has_the_names_of_its_home() -> None:
    """A case is a module of the new layout, with its home in `skyrl_train` and names in it."""
    for module, (text,) in golden.read("compat/skyrl_layout").items():
        home, _, names = text.partition(": ")
        for name in names.split():
            assert getattr(import_module(module), name) is getattr(import_module(f"skyrl_train.{home}"), name)


def test_the_interface_of_engines_is_the_client() -> None:
    base = import_module("skyrl.backends.skyrl_train.inference_servers.base")
    client = import_module("skyrl_train.inference_engines.inference_engine_client")
    assert base.InferenceEngineInterface is client.InferenceEngineClient


def test_an_inner_module_is_the_one_of_the_new_layout() -> None:
    import_module("skyrl_train.trainer")
    assert import_module("skyrl.train").trainer.RayPPOTrainer.__module__ == "skyrl.trainer"
    assert import_module("skyrl_train").trainer.RayPPOTrainer.__module__ == "skyrl_train.compat.skyrl.trainer"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import skyrl.train.nonsense", "No module named 'skyrl.train.nonsense'"),
        ("import skyrl.nonsense", "No module named 'skyrl.nonsense'"),
        ("from skyrl.train.generators.base import Nonsense", "cannot import name 'Nonsense'"),
        ("from skyrl.train.config import Nonsense", "cannot import name 'Nonsense'"),
        ("from skyrl.env_vars import SOMETHING", "SkyRL's module env_vars does not exist here"),
        ("from skyrl.train.config import InferenceEngineConfig", "SkyRL's InferenceEngineConfig does not exist here"),
        ("from skyrl.train.config.sft_config import SFTConfig", "run `skyrl sft`"),
        ("from skyrl.train.sft_trainer import SFTTrainer", "run `skyrl sft`"),
        ("from skyrl.train.generators.utils import prepare_generator_input", "return a FullyAsyncRayPPOTrainer"),
        ("from skyrl.backends.skyrl_train.inference_servers.server_group import ServerGroup", "override get_engine"),
    ],
)
def test_what_is_missing_is_refused_as_in_the_old_layout(statement: str, message: str) -> None:
    with pytest.raises(ImportError, match=message):
        exec(statement)


def test_an_entry_point_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "skyrl.train.entrypoints.main_base", "trainer.epoch=3"]
    done = subprocess.run(command, cwd=TRAIN_FOLDER, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr == "error: trainer.epoch=3: there is no key trainer.epoch; did you mean trainer.epochs?\n"


def test_the_package_is_installed_with_skyrl_train() -> None:
    settings = tomllib.loads((TRAIN_FOLDER / "pyproject.toml").read_text())
    assert "skyrl" in settings["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = [path.parent for path in (TRAIN_FOLDER / "skyrl").rglob("*.py")]
    assert set(folders) == {TRAIN_FOLDER / "skyrl"}, "a folder inside of it must be included, too"
