from __future__ import annotations

import asyncio
import importlib.util
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from adapters.openenv.contract import (
    ENTRY_POINT,
    PROMPT,
    EchoServer,
    OpenEnvContract,
    OpenEnvToolContract,
    call,
    check_no_leaks,
    make_env,
    message_text,
    wait_for_no_tasks,
)
from adapters.openenv.server import Broken, Columns, Moves, Pairs, ProtocolServer, Tools
from omegaconf import OmegaConf

from skyrl_gym.adapters.openenv import OpenEnvEnv
from skyrl_gym.adapters.openenv.client import (
    ExecutionFailed,
    OpenEnvError,
    ProtocolError,
    ServerUnavailable,
    SessionLost,
    SessionRefused,
)
from skyrl_gym.runtime.worker import EnvWorker


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    with ProtocolServer() as server:
        yield server


async def start_env(server: EchoServer, extras: dict[str, Any] | None = None, **env_config: Any) -> OpenEnvEnv:
    env = make_env(server, extras, **env_config)
    await env.init_async(PROMPT)
    return env


async def wait_until_idle(server: ProtocolServer) -> None:
    """Wait until the server has closed every environment."""
    async with asyncio.timeout(30):
        while server.n_open:
            await asyncio.sleep(0.01)


class TestContract(OpenEnvContract):
    """The contract with our own server."""


class TestToolContract(OpenEnvToolContract):
    """The contract of tools with our own server."""

    @pytest.fixture
    def tool_server(self) -> Iterator[ProtocolServer]:
        with ProtocolServer(Tools) as server:
            yield server


class TestObservations:
    async def test_first_observation_is_appended_to_the_prompt(self, server: ProtocolServer) -> None:
        env = make_env(server, {"reset": {"greeting": "Good morning", "seed": None}, "extra_info": {"seed": 7}})
        prompt, _ = await env.init_async([{"role": "system", "content": "You echo."}, *PROMPT])
        assert [message["role"] for message in prompt] == ["system", "user"]
        assert prompt[1]["content"] == "Say something.\n\nechoed_message: Good morning\nseed: 7"
        await env.close_async()

    async def test_observation_may_be_a_field_or_a_template(self, server: ProtocolServer) -> None:
        env = await start_env(server, observation="echoed_message")
        assert message_text(await env.step_async("hello")) == "hello"
        await env.close_async()
        env = await start_env(server, {"extra_info": {"env_config": {"observation": "You said {echoed_message}!"}}})
        assert message_text(await env.step_async("hello")) == "You said hello!"
        await env.close_async()

    async def test_missing_field_is_named(self, server: ProtocolServer) -> None:
        with pytest.raises(ValueError, match=r"names 'board'; the environment's observation has echoed_message, seed"):
            await start_env(server, observation="{board}")
        await wait_until_idle(server)

    async def test_thoughts_are_not_sent(self, server: ProtocolServer) -> None:
        env = await start_env(server, observation="echoed_message")
        assert message_text(await env.step_async("<think>drop</think>\nhello")) == "hello"
        assert message_text(await env.step_async("I say <action>bye</action>.")) == "bye"
        await env.close_async()


class TestRewards:
    async def test_reward_of_a_step_is_that_of_the_server(self, server: ProtocolServer) -> None:
        env = await start_env(server, {"max_turns": 3})
        assert [(await env.step_async(text))["reward"] for text in ("hello", "silent", "silent")] == [0.5, 0.0, 0.0]
        await env.close_async()

    async def test_episode_without_any_reward_has_missing_reward(self, server: ProtocolServer) -> None:
        env = await start_env(server, {"max_turns": 2})
        assert (await env.step_async("silent"))["reward"] == 0.0
        output = await env.step_async("silent")
        assert (output["reward"], output["done"], output["observations"]) == (None, True, [])
        await env.close_async()
        env = await start_env(server, {"max_turns": 1}, missing_reward=-1.0)
        assert (await env.step_async("silent"))["reward"] == -1.0
        await env.close_async()

    async def test_the_server_ends_the_episode(self, server: ProtocolServer) -> None:
        env = await start_env(server, {"max_turns": 9})
        output = await env.step_async("stop")
        assert (output["reward"], output["done"], output["observations"]) == (0.4, True, [])
        assert env.get_metrics() == {"steps": 1, "invalid_actions": 0, "actions": 1, "ended_by_env": 1}
        with pytest.raises(RuntimeError, match="over"):
            await env.step_async("hello")
        await env.close_async()

    @pytest.mark.parametrize(("message", "said"), [("nan", "nan"), ("text", "much")])
    async def test_reward_must_be_a_finite_number(self, server: ProtocolServer, message: str, said: str) -> None:
        env = await start_env(server)
        with pytest.raises(ProtocolError, match=f"reward={said}"):
            await env.step_async(message)
        await env.close_async()


class TestActions:
    async def test_single_text_field_takes_the_reply(self, server: ProtocolServer) -> None:
        env = make_env(server)
        prompt, _ = await env.init_async(PROMPT)
        assert "<action>" not in prompt[0]["content"]
        await env.close_async()

    async def test_empty_reply_is_an_invalid_action(self, server: ProtocolServer) -> None:
        env = await start_env(server, {"max_turns": 2})
        output = await env.step_async("<think>never ends")
        assert (message_text(output), output["reward"], output["done"]) == (
            "Your reply contains no action.",
            0.0,
            False,
        )
        assert (await env.step_async(""))["done"]
        assert env.get_metrics()["invalid_actions"] == 2
        await env.close_async()

    async def test_a_number(self) -> None:
        with ProtocolServer(Columns) as server:
            env = make_env(server)
            prompt, _ = await env.init_async(PROMPT)
            assert prompt[0]["content"].endswith("the value of column (integer).")
            assert "got: column: 3" in message_text(await env.step_async("I acquire <action>3</action>, not 4."))
            assert "got: column: 5" in message_text(await env.step_async('{"column": 5}'))
            assert "no whole number" in message_text(await env.step_async("the third"))
            assert "more than one" in message_text(await env.step_async("3 or 4"))
            assert env.get_metrics() == {"steps": 4, "invalid_actions": 2, "actions": 2, "ended_by_env": 0}
            await env.close_async()

    async def test_choice(self) -> None:
        with ProtocolServer(Moves) as server:
            env = await start_env(server)
            assert "got: move: left" in message_text(await env.step_async("LEFT"))
            assert 'move (one of "left", "right")' in message_text(await env.step_async("up"))
            await env.close_async()

    async def test_several_fields_are_json(self) -> None:
        with ProtocolServer(Pairs) as server:
            env = await start_env(server, action={"fixed": {"label": "fixed"}})
            reply = 'Not {"x": 1} but\n```json\n{"x": 2.5, "label": "mine"}\n```'
            assert message_text(await env.step_async(reply)) == "got:\nx: 2.5\nlabel: fixed"
            assert "got:" in message_text(await env.step_async('<action>{"x": 1}</action>, where x is {1}'))
            assert "must be a JSON object" in message_text(await env.step_async("x is 2"))
            for depth in (500, 900, 940, 960, 980):
                deep = '{"x":' * depth + "1" + "}" * depth
                assert "nested too deeply" in message_text(await env.step_async(deep))
            message = message_text(await env.step_async('{"x": "much"}'))
            assert "VALIDATION_ERROR" in message
            assert "x: Input should be a valid number" in message
            assert "- label (string)\n- note (string, optional)" in message
            assert env.get_metrics()["invalid_actions"] == 7
            await env.close_async()

    async def test_schema_is_fetched_once(self, server: ProtocolServer) -> None:
        server.capacity = 30
        envs = await asyncio.gather(*(start_env(server) for _ in range(20)))
        await asyncio.gather(*(env.close_async() for env in envs))
        assert server.n_schema_requests == 1

    async def test_missing_schema_needs_configuration(self) -> None:
        with ProtocolServer(has_schema=False) as server:
            with pytest.raises(ServerUnavailable, match=r"404.*action\.text_field"):
                await start_env(server)
            env = await start_env(server, action={"text_field": "message"}, observation="echoed_message")
            assert message_text(await env.step_async("hello")) == "hello"
            await env.close_async()
            assert server.n_schema_requests == 0


class TestTools:
    async def test_tools_are_called(self) -> None:
        with ProtocolServer(Tools) as server:
            env = make_env(server)
            prompt, _ = await env.init_async(PROMPT)
            assert [message["role"] for message in prompt] == ["system", "user"]
            assert '"name": "echo_message"' in prompt[0]["content"]
            said = message_text(await env.step_async(call("echo_message", "hello")))
            assert said == "<tool_response>\nhello\n</tool_response>"
            await env.close_async()

    async def test_calls_of_a_reply_are_played_in_order_until_done(self) -> None:
        with ProtocolServer(Tools) as server:
            env = await start_env(server)
            messages = ("pay", "pay", "stop", "pay")
            output = await env.step_async("".join(call("echo_message", message) for message in messages))
            assert (output["reward"], output["done"]) == (1.0, True)
            assert env.get_metrics()["actions"] == 3
            await env.close_async()

    async def test_mistakes_are_explained(self) -> None:
        with ProtocolServer(Tools) as server:
            env = await start_env(server)
            assert message_text(await env.step_async("hello")) == "Your reply calls no tool."
            assert "not valid JSON" in message_text(await env.step_async("<tool_call>{oops</tool_call>"))
            assert "Error (tool_not_found): no fly" in message_text(await env.step_async(call("fly", "away")))
            assert "Error: oops" in message_text(await env.step_async(call("echo_message", "oops")))
            assert "more than 32 tool calls" in message_text(await env.step_async(call("echo_message", "again") * 33))
            assert env.get_metrics()["invalid_actions"] == 3
            await env.close_async()

    async def test_plain_text_arguments_are_converted(self) -> None:
        with ProtocolServer(Tools) as server:
            env = await start_env(server)
            plain = "<function=add><parameter=a>2</parameter><parameter=b>40</parameter></function>"
            assert message_text(await env.step_async(plain)) == "<tool_response>\n42\n</tool_response>"
            await env.close_async()

    @pytest.mark.parametrize("a", ["NaN", "-Infinity", "1e999", "[" * 600 + "]" * 600, '{"x":' * 950 + "1" + "}" * 950])
    async def test_values_that_cannot_be_sent_are_explained(self, a: str) -> None:
        with ProtocolServer(Tools) as server:
            env = await start_env(server)
            reply = f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": 1}}}}</tool_call>'
            assert "not valid JSON" in message_text(await env.step_async(reply))
            assert env.get_metrics()["actions"] == 0
            await env.close_async()

    async def test_reply_without_a_call_may_end_the_episode(self) -> None:
        with ProtocolServer(Tools) as server:
            env = await start_env(server, no_tool_call="end")
            await env.step_async(call("echo_message", "pay"))
            output = await env.step_async("That is all.")
            assert (output["reward"], output["done"]) == (0.0, True)
            await env.close_async()


class TestFailures:
    async def test_dropped_connection_is_never_reopened(self, server: ProtocolServer) -> None:
        env = await start_env(server)
        with pytest.raises(SessionLost, match="disconnected"):
            await env.step_async("drop")
        with pytest.raises(SessionLost, match="disconnected"):
            await env.step_async("hello")
        await env.close_async()
        assert server.n_made == 1

    async def test_late_reply_is_never_taken_for_the_next(self, server: ProtocolServer) -> None:
        env = await start_env(server, message_timeout_s=0.2)
        with pytest.raises(SessionLost, match=r"did not answer within message_timeout_s=0\.2"):
            await env.step_async("hang")
        with pytest.raises(SessionLost, match="did not answer"):
            await env.step_async("hello")
        await env.close_async()
        await wait_for_no_tasks()

    async def test_episodes_of_a_killed_server_fail_at_once(self) -> None:
        with check_no_leaks():
            server = ProtocolServer(capacity=32).__enter__()
            envs = await asyncio.gather(*(start_env(server) for _ in range(32)))
            steps = [asyncio.create_task(env.step_async("hang")) for env in envs[:16]]
            await asyncio.sleep(0.2)
            started = time.monotonic()
            await asyncio.to_thread(server.kill)
            lost = await asyncio.gather(*steps, *(env.step_async("hello") for env in envs[16:]), return_exceptions=True)
            assert [type(error) for error in lost] == [SessionLost] * 32
            await asyncio.gather(*(env.close_async() for env in envs))
            assert time.monotonic() - started < 30  # and not after message_timeout_s
            await wait_for_no_tasks()
            await asyncio.get_running_loop().shutdown_default_executor()

    @pytest.mark.parametrize("message", ["garbage", "other type", "no observation"])
    async def test_unexpected_message_ends_the_session(self, server: ProtocolServer, message: str) -> None:
        env = await start_env(server)
        with pytest.raises(ProtocolError, match="the server sent"):
            await env.step_async(message)
        with pytest.raises(SessionLost, match="the server sent"):
            await env.step_async("hello")
        await env.close_async()

    async def test_an_environment_that_raises_fails_the_rollout(self, server: ProtocolServer) -> None:
        env = await start_env(server)
        with pytest.raises(ExecutionFailed, match="EXECUTION_ERROR: division by zero"):
            await env.step_async("crash")
        await env.close_async()

    async def test_execution_error_may_be_shown_to_the_model(self, server: ProtocolServer) -> None:
        env = await start_env(server, execution_error="tell")
        assert "division by zero" in message_text(await env.step_async("crash"))
        assert "hello" in message_text(await env.step_async("hello"))
        assert env.get_metrics()["invalid_actions"] == 1
        await env.close_async()

    async def test_an_environment_that_cannot_be_made_or_reset(self, server: ProtocolServer) -> None:
        with ProtocolServer(Broken) as broken, pytest.raises(SessionRefused, match="FACTORY_ERROR: no memory"):
            await start_env(broken)
        with pytest.raises(ExecutionFailed, match="cannot be reset"):
            await start_env(server, reset={"greeting": "crash"})
        with pytest.raises(ProtocolError, match="done=true"):
            await start_env(server, reset={"done": True})
        assert server.n_made == 2

    async def test_oversized_message_names_the_limit_to_raise(self, server: ProtocolServer) -> None:
        env = await start_env(server, max_message_bytes=50_000)
        with pytest.raises(SessionLost, match="raise max_message_bytes=50000"):
            await env.step_async("long")
        await env.close_async()

    async def test_unreachable_server(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            env = OpenEnvEnv({"url": f"ws://127.0.0.1:{taken.getsockname()[1]}", "action": {"text_field": "m"}}, {})
            with pytest.raises(ServerUnavailable, match="cannot open a session on ws://127"):
                await env.init_async(PROMPT)
            await env.close_async()
        await wait_for_no_tasks()

    async def test_errors_share_a_base_class(self, server: ProtocolServer) -> None:
        with pytest.raises(OpenEnvError):
            await start_env(server, reset={"greeting": "crash"})

    async def test_a_step_before_init(self, server: ProtocolServer) -> None:
        env = make_env(server)
        with pytest.raises(RuntimeError, match="init"):
            env.step("hello")
        with pytest.raises(RuntimeError, match="init"):
            await env.step_async("hello")
        env.close()

    async def test_second_init_raises(self, server: ProtocolServer) -> None:
        env = await start_env(server)
        with pytest.raises(RuntimeError, match="started"):
            await env.init_async(PROMPT)
        await env.close_async()

    def test_failed_blocking_init_leaves_nothing_behind(self, server: ProtocolServer) -> None:
        with check_no_leaks():
            env = make_env(server, reset={"greeting": "crash"})
            with pytest.raises(ExecutionFailed):
                env.init(PROMPT)
            env.close()

    async def test_async_session_can_be_closed_from_another_thread(self, server: ProtocolServer) -> None:
        env = await start_env(server)
        await asyncio.to_thread(env.close)
        await wait_for_no_tasks()
        await wait_until_idle(server)

    def test_session_can_be_closed_after_its_event_loop(self, server: ProtocolServer) -> None:
        env = asyncio.run(start_env(server))
        env.close()
        env = asyncio.run(start_env(server))
        asyncio.run(env.close_async())


class TestSettings:
    def test_worker_process_accepts_omegaconf_and_json(self, server: ProtocolServer) -> None:
        env_config = OmegaConf.create({"url": server.url, "reset": {"greeting": "From OmegaConf"}})
        with OpenEnvEnv(env_config, {}) as env:
            assert "From OmegaConf" in env.init(PROMPT)[0][0]["content"]
        worker = EnvWorker()
        worker.call("make", ["openenv", ENTRY_POINT, {}, {"url": server.url}, {"max_turns": 1}])
        worker.call("init", [PROMPT])
        assert worker.call("step", ["hello"])["done"]
        worker.call("close", [])

    def test_headers_are_sent(self, server: ProtocolServer) -> None:
        with make_env(server, headers={"Authorization": "Bearer abc"}) as env:
            env.init(PROMPT)
            assert server.headers["Authorization"] == "Bearer abc"

    @pytest.mark.parametrize(
        ("env_config", "message"),
        [
            ({}, r"openenv\.url is missing"),
            ({"url": "localhost:8000"}, r"url='localhost:8000' is not a server's address"),
            ({"url": 8000}, r"url=8000 should be a valid string"),
            ({"url": "http://h", "max_session": 3}, r"max_session is unknown; did you mean max_sessions\?"),
            ({"url": "http://h", "action": "x"}, r"openenv\.action='x' must be a section"),
            ({"url": "http://h", "action": {"field": "x"}}, r"action\.field is unknown; known: fixed, format"),
            ({"url": "http://h", "action": {"format": "xml"}}, r"action\.format='xml'"),
            (
                {"url": "http://h", "execution_error": "ignore"},
                r"execution_error='ignore' is unknown; use raise or tell",
            ),
            ({"url": "http://h", "message_timeout_s": 0}, r"message_timeout_s=0 must be"),
            ({"url": "http://h", "max_sessions": 0}, r"max_sessions=0 must be"),
        ],
    )
    def test_invalid_config_raises(self, env_config: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            OpenEnvEnv(env_config, {})

    def test_invalid_row_raises(self) -> None:
        with pytest.raises(ValueError, match="reset='now' of a dataset row must be a dict"):
            OpenEnvEnv({"url": "http://h"}, {"reset": "now"})

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"websockets: pip install '\./skyrl-gym\[openenv\]'"):
            OpenEnvEnv({"url": "http://h"}, {})
