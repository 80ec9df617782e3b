from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyrl_gym.core import Env
from skyrl_gym.methods import awaited_method, call


class Both(Env[Any, Any]):
    step_async = "no coroutine function"

    async def init_async(self, prompt: str) -> tuple[str, asyncio.AbstractEventLoop]:
        return prompt, asyncio.get_running_loop()

    def init(self, prompt: str) -> Any:
        raise AssertionError("init_async comes first")

    def step(self, action: str) -> Any:
        return f"step {action}"


def test_a_coroutine_function_comes_first_and_is_awaited_in_the_loop_of_the_runner() -> None:
    with asyncio.Runner() as runner:
        assert call(Both(), runner, "init", "Go") == ("Go", runner.get_loop())
        assert call(Both(), runner, "step", "on") == "step on"


def test_what_is_no_coroutine_function_is_not_awaited() -> None:
    env = Both()
    assert awaited_method(env, "init") == env.init_async
    assert awaited_method(env, "step") is None
    assert awaited_method(env, "close") is None


def test_a_method_that_is_missing_is_an_error() -> None:
    with asyncio.Runner() as runner, pytest.raises(AttributeError, match="get_metrics"):
        call(Both(), runner, "get_metrics")
