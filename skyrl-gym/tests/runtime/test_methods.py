from __future__ import annotations

import asyncio
from typing import Any

from skyrl_gym.core import Env
from skyrl_gym.runtime.methods import call_method


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
