import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from gym_kit.messages import user
from gym_kit.processes import no_leaks

from skyrl_gym.adapters.async_env import AsyncEnv
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType

PROMPT = user("Begin.")


class RecordingEnv(AsyncEnv):
    """Records the event loop of each call."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.entries: list[tuple[str, Any]] = []
        self.fails = fails

    async def init_async(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        self.entries.append(("init", asyncio.get_running_loop()))
        if self.fails:
            raise ConnectionError("nobody there")
        return prompt, {}

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        self.entries.append(("step", asyncio.get_running_loop()))
        return BaseTextEnvStepOutput(observations=[], reward=1.0, done=True, metadata={})

    async def _release(self) -> None:
        self.entries.append(("release", asyncio.get_running_loop()))

    def _abandon(self) -> None:
        self.entries.append(("abandon", None))


@pytest.fixture(autouse=True)
def check_no_threads_left() -> Iterator[None]:
    with no_leaks():
        yield


def test_blocking_methods_share_a_loop() -> None:
    with RecordingEnv() as env:
        assert env.init(PROMPT)[0] == PROMPT
        assert env.step("hello")["reward"] == 1.0
    names, loops = zip(*env.entries, strict=True)
    assert names == ("init", "step", "release")
    assert len(set(loops)) == 1
    assert loops[0].is_closed()
    env.close()
    assert env.entries[-1] == ("abandon", None)


def test_failed_blocking_init_leaves_nothing_behind() -> None:
    env = RecordingEnv(fails=True)
    with pytest.raises(RuntimeError, match="call init before step"):
        env.step("hello")
    with pytest.raises(ConnectionError, match="nobody there"):
        env.init(PROMPT)
    assert [name for name, _ in env.entries] == ["init", "release"]


async def test_async_episode_is_released_in_its_loop_or_abandoned() -> None:
    env = RecordingEnv()
    await env.init_async(PROMPT)
    await env.close_async()
    assert env.entries[-1] == ("release", asyncio.get_running_loop())
    env.close()
    assert env.entries[-1] == ("abandon", None)


async def test_blocking_episode_may_be_closed_by_close_async() -> None:
    env = RecordingEnv()
    env.init(PROMPT)
    await env.close_async()
    assert [name for name, _ in env.entries] == ["init", "release"]
    assert env.entries[1][1] is not asyncio.get_running_loop()
