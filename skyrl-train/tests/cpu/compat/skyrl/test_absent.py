"""Imports of SkyRL's scripts that are refused, with what to do instead."""

from importlib import import_module
from importlib.util import find_spec

import pytest

from skyrl_train.compat.skyrl.absent import MISSING_NAMES, MODULES


@pytest.mark.parametrize("module", MODULES)
def test_a_missing_module_is_refused_with_what_to_do_instead(module: str) -> None:
    full_name = module if module.startswith("skyrl_gym.") else f"skyrl_train.{module}"
    with pytest.raises(ModuleNotFoundError) as refused:
        import_module(full_name)
    assert str(refused.value).startswith(f"SkyRL's module {module} does not exist here; {MODULES[module]} (docs/")


@pytest.mark.parametrize("module", [module for module in MISSING_NAMES if module != "config"])
def test_a_missing_name_is_refused_with_what_to_do_instead(module: str) -> None:
    for name, instead in MISSING_NAMES[module].items():
        with pytest.raises(ImportError) as refused:
            exec(f"from skyrl_train.{module} import {name}")
        assert str(refused.value).startswith(f"SkyRL's {name} does not exist here; {instead} (docs/")
    with pytest.raises(ImportError, match=f"cannot import name 'nonsense' from 'skyrl_train.{module}'"):
        exec(f"from skyrl_train.{module} import nonsense")


def test_other_missing_modules_are_reported_as_usual() -> None:
    assert find_spec("skyrl_train.nonsense") is None
    with pytest.raises(ModuleNotFoundError, match="No module named 'env_vars'"):
        import_module("env_vars")
