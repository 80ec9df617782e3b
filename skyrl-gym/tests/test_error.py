from __future__ import annotations

import pickle

import pytest

from skyrl_gym import error


@pytest.mark.parametrize(
    "name", ["RegistrationError", "InvalidSpec", "InvalidSettings", "UnregisteredEnv", "ToolFailure"]
)
def test_every_error_is_an_error_of_the_package_and_can_be_pickled(name: str) -> None:
    error_class = getattr(error, name)
    assert issubclass(error_class, error.Error)
    copied = pickle.loads(pickle.dumps(error_class("what failed, with which value, what to do")))
    assert type(copied) is error_class
    assert str(copied) == "what failed, with which value, what to do"


def test_wrong_values_are_value_errors() -> None:
    for error_class in (error.InvalidSettings, error.UnregisteredEnv, error.InvalidSpec):
        assert issubclass(error_class, ValueError)
    assert issubclass(error.InvalidSpec, error.RegistrationError)
