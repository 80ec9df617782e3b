from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyrl_gym.core import Env
from skyrl_gym.runtime.methods import async_method, call_method


class Both(Env[Any, Any]):
    step_async = "no coroutine function"

    async def init_async(self, prompt: str) -> tuple[str, asyncio.AbstractEventLoop]:
        return prompt, asyncio.get_running_loop()

    def init(self, prompt: str) -> Any:
        raise AssertionError("init_async comes first")

    def step(self, action: str) -> Any:
        return f"step {action}"


def test_coroutine_function_is_preferred_and_awaited_in_the_loop_of_the_runner() -> None:
    with asyncio.Runner() as runner:
        assert call_method(Both(), runner, "init", "Go") == ("Go", runner.get_loop())
        assert call_method(Both(), runner, "step", "on") == "step on"


def test_other_attributes_are_not_awaited() -> None:
    env = Both()
    assert async_method(env, "init") == env.init_async
    assert async_method(env, "step") is async_method(env, "close") is None
    with asyncio.Runner() as runner, pytest.raises(AttributeError, match="get_metrics"):
        call_method(env, runner, "get_metrics")
