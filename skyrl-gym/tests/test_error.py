from __future__ import annotations

import pickle

import pytest

from skyrl_gym import error

ERRORS = [
    error.Error,
    error.RegistrationError,
    error.InvalidSpec,
    error.InvalidSettings,
    error.UnregisteredEnv,
    error.InvalidAnswer,
    error.ToolFailure,
]


@pytest.mark.parametrize("error_class", ERRORS)
def test_every_error_is_an_error_of_the_package(error_class: type[error.Error]) -> None:
    assert issubclass(error_class, error.Error)


@pytest.mark.parametrize("error_class", ERRORS)
def test_every_error_can_be_pickled(error_class: type[error.Error]) -> None:
    copied = pickle.loads(pickle.dumps(error_class("what failed, with which value, what to do")))
    assert type(copied) is error_class
    assert str(copied) == "what failed, with which value, what to do"


def test_wrong_values_are_value_errors() -> None:
    assert issubclass(error.InvalidSettings, ValueError)
    assert issubclass(error.UnregisteredEnv, ValueError)
    assert issubclass(error.InvalidSpec, ValueError)
    assert issubclass(error.InvalidSpec, error.RegistrationError)
