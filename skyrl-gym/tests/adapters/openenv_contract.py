"""What our client and a server of OpenEnv owe each other; runs against any server.

A test module subclasses `OpenEnvContract` and has a fixture `server`: an object with the `url` of a server and its
`capacity`, the sessions that it plays at once (at least 2). Its environment takes ``{"message": str}``, shows
``{"echoed_message": str}`` and whatever else, gives a reward for it, and is never done.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import pytest

import skyrl_gym
from skyrl_gym.adapters.openenv import OpenEnvEnv
from skyrl_gym.adapters.openenv_client import InvalidMessage, OpenEnvSession, SessionLost

PROMPT = [{"role": "user", "content": "Say something."}]
ENTRY_POINT = "skyrl_gym.adapters.openenv:OpenEnvEnv"


class EchoServer(Protocol):
    url: str
    capacity: int


class ToolServer(Protocol):
    url: str
    tool: str


def open_descriptors() -> int:
    """How many descriptors this process holds."""
    return len(os.listdir("/dev/fd"))


@contextmanager
def nothing_left() -> Iterator[None]:
    """Afterwards there are as many descriptors and threads as before. A server in this process needs a moment."""
    descriptors, threads = open_descriptors(), threading.active_count()
    yield
    deadline = time.monotonic() + 30
    while (open_descriptors(), threading.active_count()) > (descriptors, threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_descriptors() <= descriptors
    assert threading.active_count() <= threads


async def no_tasks_left() -> None:
    """Wait until this task is the only one of its event loop."""
    async with asyncio.timeout(30):
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0.01)


def env_of(server: EchoServer, extras: dict[str, Any] | None = None, **env_config: Any) -> OpenEnvEnv:
    return OpenEnvEnv({"url": server.url, **env_config}, extras or {})


async def play(env: OpenEnvEnv, n_turns: int) -> list[str]:
    """What an environment answers to a few messages."""
    heard = []
    try:
        await env.init_async(PROMPT)
        for turn in range(n_turns):
            output = await env.step_async(f"message {turn}")
            heard.append(output["observations"][0]["content"])
            await asyncio.sleep(0)
    finally:
        await env.close_async()
    return heard


def text_of(output: Any) -> str:
    """What the model reads after a step."""
    (message,) = output["observations"]
    assert message["role"] == "user"
    return message["content"]


def call(tool: str, message: str) -> str:
    """A reply that calls a tool."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': {'message': message}})}</tool_call>"


class OpenEnvToolContract:
    """The same for environments built on MCP: the fixture `tool_server` has a `url`, and a `tool` that repeats the
    `message` that it is given.
    """

    async def test_tools_are_listed_and_called(self, tool_server: ToolServer) -> None:
        env = OpenEnvEnv({"url": tool_server.url}, {})
        prompt, _ = await env.init_async(PROMPT)
        assert prompt[0]["role"] == "system"
        assert f'"name": "{tool_server.tool}"' in prompt[0]["content"]
        assert "hello" in text_of(await env.step_async(call(tool_server.tool, "hello")))
        two = call(tool_server.tool, "one") + call(tool_server.tool, "two")
        assert text_of(await env.step_async(two)).count("<tool_response>") == 2
        assert env.get_metrics()["actions"] == 3
        await env.close_async()

    async def test_a_tool_that_is_not_there_is_told(self, tool_server: ToolServer) -> None:
        env = OpenEnvEnv({"url": tool_server.url}, {})
        await env.init_async(PROMPT)
        assert "Error" in text_of(await env.step_async(call("no_such_tool", "hello")))
        assert "hello" in text_of(await env.step_async(call(tool_server.tool, "hello")))
        await env.close_async()


class OpenEnvContract:
    async def test_a_session_resets_steps_and_says_its_state(self, server: EchoServer) -> None:
        async with OpenEnvSession(server.url) as session:
            first = await session.reset()
            assert not first.done
            result = await session.step({"message": "hello"})
            assert result.observation["echoed_message"] == "hello"
            assert isinstance(result.reward, float)
            assert not result.done
            assert (await session.state())["step_count"] == 1

    async def test_a_session_can_be_reset_again(self, server: EchoServer) -> None:
        async with OpenEnvSession(server.url) as session:
            await session.reset()
            await session.step({"message": "hello"})
            await session.reset()
            assert (await session.state())["step_count"] == 0

    async def test_every_session_plays_an_environment_of_its_own(self, server: EchoServer) -> None:
        async with OpenEnvSession(server.url) as one, OpenEnvSession(server.url) as other:
            await one.reset()
            await other.reset()
            await one.step({"message": "hello"})
            assert (await one.state())["step_count"] == 1
            assert (await other.state())["step_count"] == 0

    async def test_a_session_survives_an_action_that_is_not_accepted(self, server: EchoServer) -> None:
        async with OpenEnvSession(server.url) as session:
            await session.reset()
            with pytest.raises(InvalidMessage, match="message"):
                await session.step({"mesage": "hello"})
            assert (await session.step({"message": "again"})).observation["echoed_message"] == "again"

    async def test_a_closed_session_stays_closed(self, server: EchoServer) -> None:
        session = OpenEnvSession(server.url)
        await session.reset()
        await session.close()
        await session.close()
        with pytest.raises(SessionLost, match="closed"):
            await session.step({"message": "hello"})
        with pytest.raises(SessionLost, match="closed"):
            await session.reset()

    async def test_more_sessions_than_places_take_turns(self, server: EchoServer) -> None:
        heard = await asyncio.gather(*(play(env_of(server), 2) for _ in range(server.capacity + 6)))
        assert all("message 1" in answers[1] for answers in heard)

    async def test_a_place_is_free_when_its_session_is_closed(self, server: EchoServer) -> None:
        for _ in range(3 * server.capacity):
            await play(env_of(server, capacity_timeout_s=10), 1)

    async def test_64_episodes_of_5_turns(self, server: EchoServer) -> None:
        with nothing_left():
            started = time.monotonic()
            heard = await asyncio.gather(*(play(env_of(server), 5) for _ in range(64)))
            assert time.monotonic() - started < 60
            await no_tasks_left()
            await asyncio.get_running_loop().shutdown_default_executor()
        for answers in heard:
            assert [f"message {turn}" in answer for turn, answer in enumerate(answers)] == [True] * 5

    def test_an_environment_by_hand_needs_a_url_only(self, server: EchoServer) -> None:
        with nothing_left():
            skyrl_gym.register(id="openenv", entry_point=ENTRY_POINT)
            with skyrl_gym.make("openenv", env_config={"url": server.url}, extras={"max_turns": 2}) as env:
                prompt, _ = env.init(PROMPT)
                assert prompt[0]["content"].startswith("Say something.")
                output = env.step("hello")
                assert "hello" in output["observations"][0]["content"]
                assert not output["done"]
                assert env.step("bye")["done"]
                assert env.get_metrics()["steps"] == 2

    async def test_an_environment_by_hand_works_inside_an_event_loop_too(self, server: EchoServer) -> None:
        with nothing_left():
            env = env_of(server)
            env.init(PROMPT)
            assert "hello" in env.step("hello")["observations"][0]["content"]
            env.close()
            env.close()

    async def test_a_cancelled_step_ends_the_session(self, server: EchoServer) -> None:
        env = env_of(server)
        await env.init_async(PROMPT)
        task = asyncio.create_task(env.step_async("hello"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(SessionLost, match="over"):
            await env.step_async("hello")
        await env.close_async()
        await no_tasks_left()
