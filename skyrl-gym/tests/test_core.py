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


def test_an_environment_is_any_pair_of_observation_and_action_types() -> None:
    env = Countdown(3)
    assert env.init() == (3, {"start": 3})
    output = env.step(2)
    assert output == {"observations": 1, "reward": 0.5, "done": False, "metadata": {}}
    assert type(output) is dict
    assert env.step(1)["done"] is True
    assert str(env) == "Env(Countdown)"
    assert env.spec is None  # made without the registry


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
