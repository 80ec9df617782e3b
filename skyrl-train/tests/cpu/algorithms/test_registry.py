"""Registration and lookup: user functions, names already taken, and unknown names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from skyrl_train import algorithms
from skyrl_train.algorithms import registry
from skyrl_train.algorithms.advantages import grpo
from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.errors import ConfigError

ESTIMATORS = (registry.register_advantage_estimator, registry.advantage_estimator, "advantage_estimator")
LOSSES = (registry.register_policy_loss, registry.policy_loss, "policy_loss_type")


@pytest.fixture(autouse=True)
def registries_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the registrations of a test."""
    for functions in (registry.ADVANTAGE_ESTIMATORS, registry.POLICY_LOSSES):
        monkeypatch.setattr(functions, "_entries", dict(functions._entries))


def my_function(**_: Any) -> None: ...


def test_the_defaults_are_registered_on_import() -> None:
    assert algorithms.advantage_estimator("grpo") is grpo
    assert algorithms.policy_loss("regular") is clipped_surrogate


@pytest.mark.parametrize(("register", "look_up", "key"), [ESTIMATORS, LOSSES])
class TestBothRegistries:
    def test_a_registered_function_is_found_and_returned_unchanged(
        self, register: Callable[..., Any], look_up: Callable[..., Any], key: str
    ) -> None:
        assert register("mine")(my_function) is my_function
        assert look_up("mine") is my_function

    def test_a_taken_name_is_refused_and_keeps_its_function(
        self, register: Callable[..., Any], look_up: Callable[..., Any], key: str
    ) -> None:
        register("mine")(my_function)
        with pytest.raises(ConfigError, match=r"'mine' is already registered as .*my_function"):
            register("mine")(print)
        assert look_up("mine") is my_function

    def test_a_built_in_function_that_skyrl_does_not_have_can_be_replaced_once(
        self, register: Callable[..., Any], look_up: Callable[..., Any], key: str
    ) -> None:
        name = {"advantage_estimator": "maxrl", "policy_loss_type": "dppo"}[key]
        register(name)(my_function)
        assert look_up(name) is my_function
        with pytest.raises(ConfigError, match=f"{name!r} is already registered"):
            register(name)(print)

    def test_an_unknown_name_is_refused_with_the_available_names(
        self, register: Callable[..., Any], look_up: Callable[..., Any], key: str
    ) -> None:
        register("zeta")(my_function)
        register("alpha")(my_function)
        with pytest.raises(ConfigError, match=rf"trainer\.algorithm\.{key}='alhpa' .*available: alpha, .*, zeta$"):
            look_up("alhpa")


def test_the_two_registries_are_independent() -> None:
    registry.register_policy_loss("mine")(my_function)
    with pytest.raises(ConfigError):
        registry.advantage_estimator("mine")
