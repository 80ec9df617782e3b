import inspect
from typing import Any

import pytest

from skyrl_train.algorithms import registry
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError


@pytest.fixture(autouse=True)
def registries_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the registrations of a test."""
    for functions in (registry.ADVANTAGE_ESTIMATORS, registry.POLICY_LOSSES):
        monkeypatch.setattr(functions, "entries", dict(functions.entries))


def my_function(**_: Any) -> None: ...


@pytest.mark.parametrize(
    ("register", "look_up", "key", "replaceable"),
    [
        (registry.register_advantage_estimator, registry.advantage_estimator, "advantage_estimator", "maxrl"),
        (registry.register_policy_loss, registry.policy_loss, "policy_loss_type", "dppo"),
    ],
)
def test_the_first_function_of_a_user_takes_a_name(register: Any, look_up: Any, key: str, replaceable: str) -> None:
    """It may replace a built-in function that SkyRL does not have."""
    assert register("alpha")(my_function) is my_function
    for name in ("zeta", replaceable):
        register(name)(my_function)
        assert look_up(name) is my_function
        with pytest.raises(ConfigError, match=f"'{name}' is already registered as .*my_function"):
            register(name)(print)
        assert look_up(name) is my_function
    with pytest.raises(ConfigError, match=rf"trainer\.algorithm\.{key}='alhpa' .*available: alpha, .*, zeta$"):
        look_up("alhpa")


@pytest.mark.parametrize("name", registry.ADVANTAGE_ESTIMATORS.list_available())
def test_an_estimator_that_is_called_directly_has_the_defaults_of_the_configuration(name: str) -> None:
    defaults = AlgorithmConfig()
    for parameter in inspect.signature(registry.ADVANTAGE_ESTIMATORS.get(name)).parameters.values():
        if parameter.default is not parameter.empty and hasattr(defaults, parameter.name):
            assert parameter.default == getattr(defaults, parameter.name), parameter.name
