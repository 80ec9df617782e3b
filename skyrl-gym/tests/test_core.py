import pytest

from skyrl_gym.core import Env


class Closable(Env[int, int]):
    """Counts how often it is closed."""

    times_closed = 0

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
    with Closable() as env:
        assert env.times_closed == 0
    with pytest.raises(ZeroDivisionError), env:
        raise ZeroDivisionError
    assert env.times_closed == 2
