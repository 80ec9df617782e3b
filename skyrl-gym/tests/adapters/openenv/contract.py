"""The contract of our client with OpenEnv servers; runs against any server.

A test module subclasses `OpenEnvContract` and has a fixture `server`: an object with the `url` of a server and its
`capacity`, the maximum number of sessions (at least 2). Its environment takes ``{"message": str}``, returns a
reward and ``{"echoed_message": str}``, and is never done.
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
from skyrl_gym.adapters.openenv.client import InvalidMessage, OpenEnvSession, SessionLost

PROMPT = [{"role": "user", "content": "Say something."}]
ENTRY_POINT = "skyrl_gym.adapters.openenv:OpenEnvEnv"


class EchoServer(Protocol):
    url: str
    capacity: int


class ToolServer(Protocol):
    url: str
    tool: str


def open_descriptors() -> int:
    """Return the number of open file descriptors of this process."""
    return len(os.listdir("/dev/fd"))


@contextmanager
def check_no_leaks() -> Iterator[None]:
    """Check that the block leaves no descriptors or threads behind, after a moment for servers in this process."""
    descriptors, threads = open_descriptors(), threading.active_count()
    yield
    deadline = time.monotonic() + 30
    while (open_descriptors(), threading.active_count()) > (descriptors, threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_descriptors() <= descriptors
    assert threading.active_count() <= threads


async def wait_for_no_tasks() -> None:
    """Wait until this task is the only one of its event loop."""
    async with asyncio.timeout(30):
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0.01)


def make_env(server: EchoServer, extras: dict[str, Any] | None = None, **env_config: Any) -> OpenEnvEnv:
    return OpenEnvEnv({"url": server.url, **env_config}, extras or {})


async def play(env: OpenEnvEnv, n_turns: int) -> list[str]:
    """Play `n_turns` messages; return the observations."""
    replies = []
    try:
        await env.init_async(PROMPT)
        for turn in range(n_turns):
            output = await env.step_async(f"message {turn}")
            replies.append(output["observations"][0]["content"])
            await asyncio.sleep(0)
    finally:
        await env.close_async()
    return replies


def message_text(output: Any) -> str:
    """Return the text of a step's only observation."""
    (message,) = output["observations"]
    assert message["role"] == "user"
    return message["content"]


def call(tool: str, message: str) -> str:
    """Format a reply that calls a tool."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': {'message': message}})}</tool_call>"


class OpenEnvToolContract:
    """The contract with environments built on MCP: the fixture `tool_server` has a `url` and the name of a `tool` that
    repeats its `message`.
    """

    async def test_tools_are_listed_and_called(self, tool_server: ToolServer) -> None:
        env = OpenEnvEnv({"url": tool_server.url}, {})
        prompt, _ = await env.init_async(PROMPT)
        assert prompt[0]["role"] == "system"
        assert f'"name": "{tool_server.tool}"' in prompt[0]["content"]
        assert "hello" in message_text(await env.step_async(call(tool_server.tool, "hello")))
        two = call(tool_server.tool, "one") + call(tool_server.tool, "two")
        assert message_text(await env.step_async(two)).count("<tool_response>") == 2
        assert env.get_metrics()["actions"] == 3
        await env.close_async()

    async def test_unknown_tool_is_explained(self, tool_server: ToolServer) -> None:
        env = OpenEnvEnv({"url": tool_server.url}, {})
        await env.init_async(PROMPT)
        assert "Error" in message_text(await env.step_async(call("no_such_tool", "hello")))
        assert "hello" in message_text(await env.step_async(call(tool_server.tool, "hello")))
        await env.close_async()


class OpenEnvContract:
    async def test_reset_step_and_state(self, server: EchoServer) -> None:
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

    async def test_every_session_has_a_separate_environment(self, server: EchoServer) -> None:
        async with OpenEnvSession(server.url) as one, OpenEnvSession(server.url) as other:
            await one.reset()
            await other.reset()
            await one.step({"message": "hello"})
            assert (await one.state())["step_count"] == 1
            assert (await other.state())["step_count"] == 0

    async def test_session_survives_an_invalid_action(self, server: EchoServer) -> None:
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

    async def test_sessions_beyond_the_capacity_wait(self, server: EchoServer) -> None:
        replies = await asyncio.gather(*(play(make_env(server), 2) for _ in range(server.capacity + 6)))
        assert all("message 1" in answers[1] for answers in replies)

    async def test_closed_session_frees_its_slot(self, server: EchoServer) -> None:
        for _ in range(3 * server.capacity):
            await play(make_env(server, capacity_timeout_s=10), 1)

    async def test_64_episodes_of_5_turns(self, server: EchoServer) -> None:
        with check_no_leaks():
            started = time.monotonic()
            replies = await asyncio.gather(*(play(make_env(server), 5) for _ in range(64)))
            assert time.monotonic() - started < 60
            await wait_for_no_tasks()
            await asyncio.get_running_loop().shutdown_default_executor()
        for answers in replies:
            assert [f"message {turn}" in answer for turn, answer in enumerate(answers)] == [True] * 5

    def test_blocking_environment_needs_only_a_url(self, server: EchoServer) -> None:
        with check_no_leaks():
            skyrl_gym.register(id="openenv", entry_point=ENTRY_POINT)
            with skyrl_gym.make("openenv", env_config={"url": server.url}, extras={"max_turns": 2}) as env:
                prompt, _ = env.init(PROMPT)
                assert prompt[0]["content"].startswith("Say something.")
                output = env.step("hello")
                assert "hello" in output["observations"][0]["content"]
                assert not output["done"]
                assert env.step("bye")["done"]
                assert env.get_metrics()["steps"] == 2

    async def test_blocking_environment_works_inside_an_event_loop(self, server: EchoServer) -> None:
        with check_no_leaks():
            env = make_env(server)
            env.init(PROMPT)
            assert "hello" in env.step("hello")["observations"][0]["content"]
            env.close()
            env.close()

    async def test_a_cancelled_step_ends_the_session(self, server: EchoServer) -> None:
        env = make_env(server)
        await env.init_async(PROMPT)
        task = asyncio.create_task(env.step_async("hello"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(SessionLost, match="over"):
            await env.step_async("hello")
        await env.close_async()
        await wait_for_no_tasks()
