from __future__ import annotations

from typing import Any

import pytest

from skyrl_gym.core import Env, EnvStepOutput


class Countdown(Env[int, int]):
    """Subtracts each action from a number until it reaches 0."""

    def __init__(self, start: int = 3) -> None:
        self.left = start
        self.times_closed = 0

    def init(self) -> tuple[int, dict[str, Any]]:
        return self.left, {"start": self.left}

    def step(self, action: int) -> EnvStepOutput[int]:
        self.left -= action
        return EnvStepOutput(observations=self.left, reward=0.5, done=self.left <= 0, metadata={})

    def close(self) -> None:
        self.times_closed += 1


@pytest.mark.parametrize("method", ["init", "step"])
def test_missing_method_is_named_with_its_class(method: str) -> None:
    class Unfinished(Env[str, str]):
        pass

    with pytest.raises(NotImplementedError, match=rf"Unfinished must implement {method}\(\)"):
        getattr(Unfinished(), method)("anything")
    Unfinished().close()


def test_context_manager_closes_also_after_an_error() -> None:
    with Countdown() as env:
        assert env.times_closed == 0
    with pytest.raises(ZeroDivisionError), env:
        raise ZeroDivisionError
    assert env.times_closed == 2
