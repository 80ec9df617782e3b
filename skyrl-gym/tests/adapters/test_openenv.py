from __future__ import annotations

import asyncio
import importlib.util
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from adapters.openenv_contract import (
    ENTRY_POINT,
    PROMPT,
    EchoServer,
    OpenEnvContract,
    OpenEnvToolContract,
    call,
    env_of,
    no_tasks_left,
    nothing_left,
    text_of,
)
from adapters.openenv_server import Broken, Columns, Moves, Pairs, ProtocolServer, Tools
from omegaconf import OmegaConf

from skyrl_gym.adapters.openenv import OpenEnvEnv
from skyrl_gym.adapters.openenv_client import (
    ExecutionFailed,
    OpenEnvError,
    ProtocolError,
    ServerUnavailable,
    SessionLost,
    SessionRefused,
)
from skyrl_gym.worker import Worker


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    with ProtocolServer() as server:
        yield server


async def begun(server: EchoServer, extras: dict[str, Any] | None = None, **env_config: Any) -> OpenEnvEnv:
    env = env_of(server, extras, **env_config)
    await env.init_async(PROMPT)
    return env


async def nobody_plays(server: ProtocolServer) -> None:
    """The server has put every environment away, or does so in a moment."""
    async with asyncio.timeout(30):
        while server.n_open:
            await asyncio.sleep(0.01)


class TestContract(OpenEnvContract):
    """With a server of our own."""


class TestToolContract(OpenEnvToolContract):
    """With a server of our own."""

    @pytest.fixture
    def tool_server(self) -> Iterator[ProtocolServer]:
        with ProtocolServer(Tools) as server:
            yield server


class TestObservations:
    async def test_the_prompt_ends_with_what_the_environment_shows(self, server: ProtocolServer) -> None:
        env = env_of(server, {"reset": {"greeting": "Good morning", "seed": None}, "extra_info": {"seed": 7}})
        prompt, _ = await env.init_async([{"role": "system", "content": "You echo."}, *PROMPT])
        assert [message["role"] for message in prompt] == ["system", "user"]
        assert prompt[1]["content"] == "Say something.\n\nechoed_message: Good morning\nseed: 7"
        await env.close_async()

    async def test_a_field_or_a_template_is_shown(self, server: ProtocolServer) -> None:
        env = await begun(server, observation="echoed_message")
        assert text_of(await env.step_async("hello")) == "hello"
        await env.close_async()
        env = await begun(server, {"extra_info": {"env_config": {"observation": "You said {echoed_message}!"}}})
        assert text_of(await env.step_async("hello")) == "You said hello!"
        await env.close_async()

    async def test_a_field_that_is_not_there_is_named(self, server: ProtocolServer) -> None:
        with pytest.raises(ValueError, match=r"names 'board'; what the environment shows has echoed_message, seed"):
            await begun(server, observation="{board}")
        await nobody_plays(server)

    async def test_thoughts_are_not_sent(self, server: ProtocolServer) -> None:
        env = await begun(server, observation="echoed_message")
        assert text_of(await env.step_async("<think>drop</think>\nhello")) == "hello"
        assert text_of(await env.step_async("I say <action>bye</action>.")) == "bye"
        await env.close_async()

    async def test_lone_surrogates_do_not_reach_the_tokenizer(self, server: ProtocolServer) -> None:
        env = await begun(server, observation="echoed_message", action={"format": "json"})
        told = text_of(await env.step_async('{"message": "a\\ud800"}'))
        told.encode("utf-8")
        await env.close_async()


class TestRewards:
    async def test_a_step_is_worth_what_the_server_gives(self, server: ProtocolServer) -> None:
        env = await begun(server, {"max_turns": 3})
        assert [(await env.step_async(text))["reward"] for text in ("hello", "silent", "silent")] == [0.5, 0.0, 0.0]
        await env.close_async()

    async def test_an_episode_without_any_reward_is_worth_nobody_knows_what(self, server: ProtocolServer) -> None:
        env = await begun(server, {"max_turns": 2})
        assert (await env.step_async("silent"))["reward"] == 0.0
        output = await env.step_async("silent")
        assert (output["reward"], output["done"], output["observations"]) == (None, True, [])
        await env.close_async()
        env = await begun(server, {"max_turns": 1}, missing_reward=-1.0)
        assert (await env.step_async("silent"))["reward"] == -1.0
        await env.close_async()

    async def test_the_server_ends_the_episode(self, server: ProtocolServer) -> None:
        env = await begun(server, {"max_turns": 9})
        output = await env.step_async("stop")
        assert (output["reward"], output["done"], output["observations"]) == (0.4, True, [])
        assert env.get_metrics() == {"steps": 1, "invalid_actions": 0, "actions": 1, "ended_by_env": 1}
        with pytest.raises(RuntimeError, match="over"):
            await env.step_async("hello")
        await env.close_async()

    @pytest.mark.parametrize(("message", "said"), [("nan", "nan"), ("text", "much")])
    async def test_what_is_no_number_is_no_reward(self, server: ProtocolServer, message: str, said: str) -> None:
        env = await begun(server)
        with pytest.raises(ProtocolError, match=f"reward={said}"):
            await env.step_async(message)
        await env.close_async()


class TestActions:
    async def test_one_field_of_text_takes_the_reply(self, server: ProtocolServer) -> None:
        env = env_of(server)
        prompt, _ = await env.init_async(PROMPT)
        assert "<action>" not in prompt[0]["content"]
        await env.close_async()

    async def test_an_empty_reply_is_the_models_mistake(self, server: ProtocolServer) -> None:
        env = await begun(server, {"max_turns": 2})
        output = await env.step_async("<think>never ends")
        assert (text_of(output), output["reward"], output["done"]) == ("Your reply holds no action.", 0.0, False)
        assert (await env.step_async(""))["done"]
        assert env.get_metrics()["invalid_actions"] == 2
        await env.close_async()

    async def test_a_number(self) -> None:
        with ProtocolServer(Columns) as server:
            env = env_of(server)
            prompt, _ = await env.init_async(PROMPT)
            assert prompt[0]["content"].endswith("the value of column (integer).")
            assert "got: column: 3" in text_of(await env.step_async("I take <action>3</action>, not 4."))
            assert "got: column: 5" in text_of(await env.step_async('{"column": 5}'))
            assert "no whole number" in text_of(await env.step_async("the third"))
            assert "more than one" in text_of(await env.step_async("3 or 4"))
            assert env.get_metrics() == {"steps": 4, "invalid_actions": 2, "actions": 2, "ended_by_env": 0}
            await env.close_async()

    async def test_one_of_several_words(self) -> None:
        with ProtocolServer(Moves) as server:
            env = await begun(server)
            assert "got: move: left" in text_of(await env.step_async("LEFT"))
            assert 'move (one of "left", "right")' in text_of(await env.step_async("up"))
            await env.close_async()

    async def test_json_where_there_are_several_fields(self) -> None:
        with ProtocolServer(Pairs) as server:
            env = await begun(server, action={"fixed": {"label": "fixed"}})
            reply = 'Not {"x": 1} but\n```json\n{"x": 2.5, "label": "mine"}\n```'
            assert text_of(await env.step_async(reply)) == "got:\nx: 2.5\nlabel: fixed"
            assert "got:" in text_of(await env.step_async('<action>{"x": 1}</action>, where x is {1}'))
            assert "must be a JSON object" in text_of(await env.step_async("x is 2"))
            for depth in (500, 900, 940, 960, 980):
                deep = '{"x":' * depth + "1" + "}" * depth
                assert "nested too deeply" in text_of(await env.step_async(deep))
            told = text_of(await env.step_async('{"x": "much"}'))
            assert "VALIDATION_ERROR" in told
            assert "x: Input should be a valid number" in told
            assert "- label (string)\n- note (string, optional)" in told
            assert env.get_metrics()["invalid_actions"] == 7
            await env.close_async()

    async def test_the_schema_is_asked_for_once(self, server: ProtocolServer) -> None:
        server.capacity = 30
        envs = await asyncio.gather(*(begun(server) for _ in range(20)))
        await asyncio.gather(*(env.close_async() for env in envs))
        assert server.n_schema_requests == 1

    async def test_without_a_schema_the_configuration_has_to_say(self) -> None:
        with ProtocolServer(has_schema=False) as server:
            with pytest.raises(ServerUnavailable, match=r"404.*action\.text_field"):
                await begun(server)
            env = await begun(server, action={"text_field": "message"}, observation="echoed_message")
            assert text_of(await env.step_async("hello")) == "hello"
            await env.close_async()
            assert server.n_schema_requests == 0


class TestTools:
    async def test_tools_are_called(self) -> None:
        with ProtocolServer(Tools) as server:
            env = env_of(server)
            prompt, _ = await env.init_async(PROMPT)
            assert [message["role"] for message in prompt] == ["system", "user"]
            assert '"name": "echo_message"' in prompt[0]["content"]
            said = text_of(await env.step_async(call("echo_message", "hello")))
            assert said == "<tool_response>\nhello\n</tool_response>"
            await env.close_async()

    async def test_calls_of_one_reply_are_played_in_order_until_the_end(self) -> None:
        with ProtocolServer(Tools) as server:
            env = await begun(server)
            messages = ("pay", "pay", "stop", "pay")
            output = await env.step_async("".join(call("echo_message", message) for message in messages))
            assert (output["reward"], output["done"]) == (1.0, True)
            assert env.get_metrics()["actions"] == 3
            await env.close_async()

    async def test_mistakes_are_told(self) -> None:
        with ProtocolServer(Tools) as server:
            env = await begun(server)
            assert text_of(await env.step_async("hello")) == "Your reply calls no tool."
            assert "not valid JSON" in text_of(await env.step_async("<tool_call>{oops</tool_call>"))
            assert "Error (tool_not_found): no fly" in text_of(await env.step_async(call("fly", "away")))
            assert "Error: oops" in text_of(await env.step_async(call("echo_message", "oops")))
            assert "more than 32 tool calls" in text_of(await env.step_async(call("echo_message", "again") * 33))
            assert env.get_metrics()["invalid_actions"] == 3
            await env.close_async()

    async def test_numbers_of_the_plain_syntax_are_numbers(self) -> None:
        with ProtocolServer(Tools) as server:
            env = await begun(server)
            plain = "<function=add><parameter=a>2</parameter><parameter=b>40</parameter></function>"
            assert text_of(await env.step_async(plain)) == "<tool_response>\n42\n</tool_response>"
            await env.close_async()

    @pytest.mark.parametrize("a", ["NaN", "-Infinity", "1e999", "[" * 600 + "]" * 600, '{"x":' * 950 + "1" + "}" * 950])
    async def test_what_nobody_can_send_is_told(self, a: str) -> None:
        with ProtocolServer(Tools) as server:
            env = await begun(server)
            reply = f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": 1}}}}</tool_call>'
            assert "not valid JSON" in text_of(await env.step_async(reply))
            assert env.get_metrics()["actions"] == 0
            await env.close_async()

    async def test_a_reply_without_a_call_may_be_the_last(self) -> None:
        with ProtocolServer(Tools) as server:
            env = await begun(server, no_tool_call="end")
            await env.step_async(call("echo_message", "pay"))
            output = await env.step_async("That is all.")
            assert (output["reward"], output["done"]) == (0.0, True)
            await env.close_async()


class TestFailures:
    async def test_a_dropped_connection_is_never_opened_again(self, server: ProtocolServer) -> None:
        env = await begun(server)
        with pytest.raises(SessionLost, match="hung up"):
            await env.step_async("drop")
        with pytest.raises(SessionLost, match="hung up"):
            await env.step_async("hello")
        await env.close_async()
        assert server.n_made == 1

    async def test_a_late_reply_is_never_taken_for_another(self, server: ProtocolServer) -> None:
        env = await begun(server, message_timeout_s=0.2)
        with pytest.raises(SessionLost, match=r"did not answer within message_timeout_s=0\.2"):
            await env.step_async("hang")
        with pytest.raises(SessionLost, match="did not answer"):
            await env.step_async("hello")
        await env.close_async()
        await no_tasks_left()

    async def test_episodes_of_a_server_that_is_killed_fail_at_once(self) -> None:
        with nothing_left():
            server = ProtocolServer(capacity=32).__enter__()
            envs = await asyncio.gather(*(begun(server) for _ in range(32)))
            steps = [asyncio.create_task(env.step_async("hang")) for env in envs[:16]]
            await asyncio.sleep(0.2)
            started = time.monotonic()
            await asyncio.to_thread(server.kill)
            lost = await asyncio.gather(*steps, *(env.step_async("hello") for env in envs[16:]), return_exceptions=True)
            assert [type(error) for error in lost] == [SessionLost] * 32
            await asyncio.gather(*(env.close_async() for env in envs))
            assert time.monotonic() - started < 30  # and not after message_timeout_s
            await no_tasks_left()
            await asyncio.get_running_loop().shutdown_default_executor()

    @pytest.mark.parametrize("message", ["garbage", "other type", "no observation"])
    async def test_what_is_no_answer_ends_the_session(self, server: ProtocolServer, message: str) -> None:
        env = await begun(server)
        with pytest.raises(ProtocolError, match="the server sent"):
            await env.step_async(message)
        with pytest.raises(SessionLost, match="the server sent"):
            await env.step_async("hello")
        await env.close_async()

    async def test_an_environment_that_raises_fails_the_rollout(self, server: ProtocolServer) -> None:
        env = await begun(server)
        with pytest.raises(ExecutionFailed, match="EXECUTION_ERROR: division by zero"):
            await env.step_async("crash")
        await env.close_async()

    async def test_unless_that_is_how_it_refuses_actions(self, server: ProtocolServer) -> None:
        env = await begun(server, execution_error="tell")
        assert "division by zero" in text_of(await env.step_async("crash"))
        assert "hello" in text_of(await env.step_async("hello"))
        assert env.get_metrics()["invalid_actions"] == 1
        await env.close_async()

    async def test_an_environment_that_cannot_be_made_or_reset(self, server: ProtocolServer) -> None:
        with ProtocolServer(Broken) as broken, pytest.raises(SessionRefused, match="FACTORY_ERROR: no memory"):
            await begun(broken)
        with pytest.raises(ExecutionFailed, match="cannot be reset"):
            await begun(server, reset={"greeting": "crash"})
        with pytest.raises(ProtocolError, match="done=true"):
            await begun(server, reset={"done": True})
        assert server.n_made == 2

    async def test_a_message_that_is_too_long_says_which_limit_to_raise(self, server: ProtocolServer) -> None:
        env = await begun(server, max_message_bytes=50_000)
        with pytest.raises(SessionLost, match="raise max_message_bytes=50000"):
            await env.step_async("long")
        await env.close_async()

    async def test_nobody_listens(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            env = OpenEnvEnv({"url": f"ws://127.0.0.1:{taken.getsockname()[1]}", "action": {"text_field": "m"}}, {})
            with pytest.raises(ServerUnavailable, match="cannot open a session on ws://127"):
                await env.init_async(PROMPT)
            await env.close_async()
        await no_tasks_left()

    async def test_every_error_has_one_root(self, server: ProtocolServer) -> None:
        with pytest.raises(OpenEnvError):
            await begun(server, reset={"greeting": "crash"})

    async def test_a_step_before_init(self, server: ProtocolServer) -> None:
        env = env_of(server)
        with pytest.raises(RuntimeError, match="init"):
            env.step("hello")
        with pytest.raises(RuntimeError, match="init"):
            await env.step_async("hello")
        env.close()

    async def test_an_episode_begins_once(self, server: ProtocolServer) -> None:
        env = await begun(server)
        with pytest.raises(RuntimeError, match="begun"):
            await env.init_async(PROMPT)
        await env.close_async()

    def test_by_hand_a_failed_init_leaves_nothing(self, server: ProtocolServer) -> None:
        with nothing_left():
            env = env_of(server, reset={"greeting": "crash"})
            with pytest.raises(ExecutionFailed):
                env.init(PROMPT)
            env.close()

    async def test_an_awaited_session_can_be_closed_from_another_thread(self, server: ProtocolServer) -> None:
        env = await begun(server)
        await asyncio.to_thread(env.close)
        await no_tasks_left()
        await nobody_plays(server)

    def test_a_session_outlives_its_event_loop_only_in_name(self, server: ProtocolServer) -> None:
        env = asyncio.run(begun(server))
        env.close()
        env = asyncio.run(begun(server))
        asyncio.run(env.close_async())


class TestSettings:
    def test_a_worker_process_plays_it_from_omegaconf_or_json(self, server: ProtocolServer) -> None:
        env_config = OmegaConf.create({"url": server.url, "reset": {"greeting": "From OmegaConf"}})
        with OpenEnvEnv(env_config, {}) as env:
            assert "From OmegaConf" in env.init(PROMPT)[0][0]["content"]
        worker = Worker()
        worker.answer("make", ["openenv", ENTRY_POINT, {}, {"url": server.url}, {"max_turns": 1}])
        worker.answer("init", [PROMPT])
        assert worker.answer("step", ["hello"])["done"]
        worker.answer("close", [])

    def test_headers_are_sent(self, server: ProtocolServer) -> None:
        with env_of(server, headers={"Authorization": "Bearer abc"}) as env:
            env.init(PROMPT)
            assert server.headers["Authorization"] == "Bearer abc"

    @pytest.mark.parametrize(
        ("env_config", "message"),
        [
            ({}, r"openenv\.url is missing"),
            ({"url": "localhost:8000"}, r"url='localhost:8000' is no address"),
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
    def test_what_is_wrong_is_named(self, env_config: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            OpenEnvEnv(env_config, {})

    def test_a_row_that_is_wrong_is_named(self) -> None:
        with pytest.raises(ValueError, match="reset='now' of a dataset row must be a dict"):
            OpenEnvEnv({"url": "http://h"}, {"reset": "now"})

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"websockets: pip install '\./skyrl-gym\[openenv\]'"):
            OpenEnvEnv({"url": "http://h"}, {})
