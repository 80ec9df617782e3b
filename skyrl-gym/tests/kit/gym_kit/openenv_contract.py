"""The contract of our client with OpenEnv servers; runs against any server.

A test module subclasses `OpenEnvContract` and has a fixture `server`: an object with the `url` of a server of 2 to 63
sessions, so that some of 64 episodes must wait. Its environment takes ``{"message": str}``, returns a
reward and ``{"echoed_message": str}``, and is never done.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import pytest

import skyrl_gym
from gym_kit.messages import call, message_text, user
from gym_kit.processes import no_leaks, wait_for_no_tasks
from skyrl_gym.adapters.openenv import OpenEnvEnv
from skyrl_gym.adapters.openenv.client import InvalidMessage, OpenEnvSession, SessionLost

PROMPT = user("Say something.")
ENTRY_POINT = "skyrl_gym.adapters.openenv:OpenEnvEnv"


class EchoServer(Protocol):
    url: str


class ToolServer(Protocol):
    url: str
    tool: str


def make_env(server: EchoServer, extras: dict[str, Any] | None = None, **env_config: Any) -> OpenEnvEnv:
    return OpenEnvEnv({"url": server.url, **env_config}, extras or {})


@asynccontextmanager
async def episode(
    server: EchoServer | ToolServer, extras: dict[str, Any] | None = None, **env_config: Any
) -> AsyncIterator[OpenEnvEnv]:
    """Return an environment that has been started, and close it after the block."""
    env = OpenEnvEnv({"url": server.url, **env_config}, extras or {})
    try:
        await env.init_async(PROMPT)
        yield env
    finally:
        await env.close_async()


async def play(server: EchoServer, n_turns: int, **env_config: Any) -> list[str]:
    """Play `n_turns` messages; return the observations."""
    replies = []
    async with episode(server, **env_config) as env:
        for turn in range(n_turns):
            replies.append(message_text(await env.step_async(f"message {turn}")))
            await asyncio.sleep(0)
    return replies


class OpenEnvToolContract:
    """The contract with environments built on MCP: the fixture `tool_server` has a `url` and the name of a `tool` that
    repeats its `message`.
    """

    async def test_tools_are_listed_and_called(self, tool_server: ToolServer) -> None:
        env = OpenEnvEnv({"url": tool_server.url}, {})
        prompt, _ = await env.init_async(PROMPT)
        assert [message["role"] for message in prompt] == ["system", "user"]
        assert f'"name": "{tool_server.tool}"' in prompt[0]["content"]
        assert "hello" in message_text(await env.step_async(call(tool_server.tool, message="hello")))
        two = call(tool_server.tool, message="one") + call(tool_server.tool, message="two")
        assert message_text(await env.step_async(two)).count("<tool_response>") == 2
        assert env.get_metrics()["actions"] == 3
        await env.close_async()

    async def test_unknown_tool_is_explained(self, tool_server: ToolServer) -> None:
        async with episode(tool_server) as env:
            assert "Error" in message_text(await env.step_async(call("no_such_tool", message="hello")))
            assert "hello" in message_text(await env.step_async(call(tool_server.tool, message="hello")))


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

    async def test_64_episodes_of_5_turns(self, server: EchoServer) -> None:
        with no_leaks():
            replies = await asyncio.gather(*(play(server, 5) for _ in range(64)))
            await wait_for_no_tasks()
            await asyncio.get_running_loop().shutdown_default_executor()
        for answers in replies:
            assert [f"message {turn}" in answer for turn, answer in enumerate(answers)] == [True] * 5

    def test_blocking_environment_needs_only_a_url(self, server: EchoServer) -> None:
        with no_leaks():
            skyrl_gym.register(id="openenv", entry_point=ENTRY_POINT)
            with skyrl_gym.make("openenv", env_config={"url": server.url}, extras={"max_turns": 2}) as env:
                prompt, _ = env.init(PROMPT)
                assert prompt[0]["content"].startswith("Say something.")
                output = env.step("hello")
                assert "hello" in output["observations"][0]["content"]
                assert not output["done"]
                assert env.step("bye")["done"]
                assert env.get_metrics()["steps"] == 2

    async def test_a_cancelled_step_ends_the_session(self, server: EchoServer) -> None:
        async with episode(server) as env:
            task = asyncio.create_task(env.step_async("hello"))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(SessionLost, match="over"):
                await env.step_async("hello")
        await wait_for_no_tasks()
