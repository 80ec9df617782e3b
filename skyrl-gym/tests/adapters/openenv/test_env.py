import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from gym_kit.messages import call, message_text
from gym_kit.openenv_contract import PROMPT, OpenEnvContract, OpenEnvToolContract, episode, make_env
from gym_kit.openenv_server import Broken, Columns, Moves, Pairs, Pictures, ProtocolServer, Tools
from gym_kit.processes import no_leaks, wait_for_no_tasks, wait_until_async

from skyrl_gym.adapters.openenv import OpenEnvEnv
from skyrl_gym.adapters.openenv.client import (
    ExecutionFailed,
    OpenEnvError,
    ProtocolError,
    ServerUnavailable,
    SessionLost,
    SessionRefused,
)
from skyrl_gym.images import find_images, join_texts
from skyrl_gym.runtime.validation import validate_step_output


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    with ProtocolServer() as server:
        yield server


@pytest.fixture
def tool_server() -> Iterator[ProtocolServer]:
    with ProtocolServer(Tools) as server:
        yield server


class TestContract(OpenEnvContract):
    """The contract with our own server."""


class TestToolContract(OpenEnvToolContract):
    """The contract of tools with our own server."""


class TestObservations:
    async def test_observation_may_be_a_field_or_a_template(self, server: ProtocolServer) -> None:
        async with episode(server, observation="echoed_message") as env:
            assert message_text(await env.step_async("<think>drop</think>\nhello")) == "hello"  # thoughts are not sent
            assert message_text(await env.step_async("I say <action>bye</action>.")) == "bye"
        row = {"extra_info": {"env_config": {"observation": "You said {echoed_message}!"}}}
        async with episode(server, row) as env:
            assert message_text(await env.step_async("hello")) == "You said hello!"
        message = r"has the field 'board', but the environment's observation has echoed_message, seed"
        with pytest.raises(ValueError, match=message):
            await episode(server, observation="{board}").__aenter__()
        await wait_until_async(lambda: not server.n_open)


class TestImages:
    @pytest.mark.parametrize("reads_images", [False, True])
    async def test_a_field_with_pixels(self, reads_images: bool) -> None:
        with ProtocolServer(Pictures) as server:
            async with episode(server, {"reads_images": reads_images}, image="screenshot") as env:
                output = validate_step_output(await env.step_async("hello"))
                text = join_texts(output["observations"][0]["content"]).strip()
                assert text == "echoed_message: hello\nn_steps: 1"
                images = find_images(output["observations"])
                assert [image.open().getpixel((1, 0)) for image in images] == [(0, 0, 255)] * reads_images

    @pytest.mark.parametrize("reads_images", [False, True])
    async def test_images_in_the_results_of_tools(self, reads_images: bool, tool_server: ProtocolServer) -> None:
        async with episode(tool_server, {"reads_images": reads_images}) as env:
            output = validate_step_output(await env.step_async(call("draw") + call("add", a=1, b=2)))
            assert len(find_images(output["observations"])) == reads_images
            text = join_texts(output["observations"][0]["content"])
            assert "Look:" in text
            assert text.endswith("<tool_response>\n3\n</tool_response>")
            assert "Error: Look:" in message_text(await env.step_async(call("draw", message="oops")))


class TestRewards:
    async def test_episode_without_any_reward_has_missing_reward(self, server: ProtocolServer) -> None:
        async with episode(server, {"max_turns": 3}) as env:
            assert [(await env.step_async(text))["reward"] for text in ("hello", "silent", "silent")] == [0.5, 0.0, 0.0]
        for section, reward in (({}, None), ({"missing_reward": -1.0}, -1.0)):
            async with episode(server, {"max_turns": 2}, **section) as env:
                assert (await env.step_async("silent"))["reward"] == 0.0
                output = await env.step_async("silent")
                assert (output["reward"], output["done"], output["observations"]) == (reward, True, [])

    async def test_the_server_ends_the_episode(self, server: ProtocolServer) -> None:
        async with episode(server, {"max_turns": 9}) as env:
            output = await env.step_async("stop")
            assert (output["reward"], output["done"], output["observations"]) == (0.4, True, [])
            assert env.get_metrics() == {"steps": 1, "invalid_actions": 0, "actions": 1, "ended_by_env": 1}
            with pytest.raises(RuntimeError, match="over"):
                await env.step_async("hello")

    @pytest.mark.parametrize(("message", "said"), [("nan", "nan"), ("text", "much")])
    async def test_reward_must_be_a_finite_number(self, server: ProtocolServer, message: str, said: str) -> None:
        async with episode(server) as env:
            with pytest.raises(ProtocolError, match=f"reward={said}"):
                await env.step_async(message)


class TestActions:
    async def test_text_field_takes_the_reply_unless_it_is_empty(self, server: ProtocolServer) -> None:
        env = make_env(server, {"max_turns": 2})
        prompt, _ = await env.init_async(PROMPT)
        assert "<action>" not in prompt[0]["content"]
        output = await env.step_async("<think>never ends")
        assert message_text(output) == "Your reply contains no action."
        assert (output["reward"], output["done"]) == (0.0, False)
        assert (await env.step_async(""))["done"]
        assert env.get_metrics()["invalid_actions"] == 2
        await env.close_async()

    async def test_a_number_or_a_choice(self) -> None:
        with ProtocolServer(Columns) as server:
            env = make_env(server)
            prompt, _ = await env.init_async(PROMPT)
            assert prompt[0]["content"].endswith("the value of column (integer).")
            for reply, message in {
                "I acquire <action>3</action>, not 4.": "got: column: 3",
                '{"column": 5}': "got: column: 5",
                "the third": "no whole number",
                "3 or 4": "more than one",
            }.items():
                assert message in message_text(await env.step_async(reply))
            assert env.get_metrics() == {"steps": 4, "invalid_actions": 2, "actions": 2, "ended_by_env": 0}
            await env.close_async()
        with ProtocolServer(Moves) as server:
            async with episode(server) as env:
                assert "got: move: left" in message_text(await env.step_async("LEFT"))
                assert 'move (one of "left", "right")' in message_text(await env.step_async("up"))

    async def test_several_fields_are_json(self) -> None:
        with ProtocolServer(Pairs) as server:
            async with episode(server, action={"fixed": {"label": "fixed"}}) as env:
                reply = 'Not {"x": 1} but\n```json\n{"x": 2.5, "label": "mine"}\n```'
                assert message_text(await env.step_async(reply)) == "got:\nx: 2.5\nlabel: fixed"
                assert "got:" in message_text(await env.step_async('<action>{"x": 1}</action>, where x is {1}'))
                assert "must be a JSON object" in message_text(await env.step_async("x is 2"))
                message = message_text(await env.step_async('{"x": "much"}'))
                assert "VALIDATION_ERROR" in message
                assert "x: Input should be a valid number" in message
                assert "- label (string)\n- note (string, optional)" in message
                assert env.get_metrics()["invalid_actions"] == 2

    async def test_schema_is_fetched_once_or_configured(self, server: ProtocolServer) -> None:
        server.capacity = 30
        envs = [make_env(server) for _ in range(20)]
        await asyncio.gather(*(env.init_async(PROMPT) for env in envs))
        await asyncio.gather(*(env.close_async() for env in envs))
        assert server.n_schema_requests == 1
        with ProtocolServer(has_schema=False) as bare:
            with pytest.raises(ServerUnavailable, match=r"404.*action\.text_field"):
                await episode(bare).__aenter__()
            async with episode(bare, action={"text_field": "message"}, observation="echoed_message") as env:
                assert message_text(await env.step_async("hello")) == "hello"
            assert bare.n_schema_requests == 0


class TestTools:
    async def test_calls_of_a_reply_are_played_in_order_until_done(self, tool_server: ProtocolServer) -> None:
        async with episode(tool_server) as env:
            messages = ("pay", "pay", "stop", "pay")
            output = await env.step_async("".join(call("echo_message", message=message) for message in messages))
            assert (output["reward"], output["done"]) == (1.0, True)
            assert env.get_metrics()["actions"] == 3

    async def test_mistakes_are_explained_and_a_reply_without_a_call_may_end_the_episode(
        self, tool_server: ProtocolServer
    ) -> None:
        async with episode(tool_server) as env:
            for reply, message in {
                "hello": "Your reply calls no tool.",
                "<tool_call>{oops</tool_call>": "not valid JSON",
                call("fly", message="away"): "Error (tool_not_found): no fly",
                call("echo_message", message="oops"): "Error: oops",
                call("echo_message", message="again") * 33: "more than 32 tool calls",
            }.items():
                assert message in message_text(await env.step_async(reply))
            assert env.get_metrics()["invalid_actions"] == 3
        async with episode(tool_server, no_tool_call="end") as env:
            plain = "<function=add><parameter=a>2</parameter><parameter=b>40</parameter></function>"
            assert message_text(await env.step_async(plain)) == "<tool_response>\n42\n</tool_response>"
            await env.step_async(call("echo_message", message="pay"))
            output = await env.step_async("That is all.")
            assert (output["reward"], output["done"]) == (0.0, True)


class TestFailures:
    @pytest.mark.parametrize(
        ("text", "error", "message"),
        [
            ("drop", SessionLost, "disconnected"),
            ("hang", SessionLost, r"did not answer within message_timeout_s=0\.2"),
            ("long", SessionLost, "raise max_message_bytes=50000"),
            ("garbage", ProtocolError, "the server sent"),
            ("other type", ProtocolError, "the server sent"),
            ("no observation", ProtocolError, "the server sent"),
        ],
    )
    async def test_broken_session_is_never_continued(
        self, server: ProtocolServer, text: str, error: type[Exception], message: str
    ) -> None:
        timeout_s = 0.2 if text == "hang" else 60.0
        async with episode(server, message_timeout_s=timeout_s, max_message_bytes=50_000) as env:
            with pytest.raises(error, match=message):
                await env.step_async(text)
            with pytest.raises(SessionLost):
                await env.step_async("hello")
        assert server.n_made == 1
        await wait_for_no_tasks()

    async def test_episodes_of_a_killed_server_fail_at_once(self) -> None:
        with no_leaks():
            server = ProtocolServer(capacity=32).__enter__()
            envs = [make_env(server) for _ in range(32)]
            await asyncio.gather(*(env.init_async(PROMPT) for env in envs))
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

    async def test_execution_error_is_raised_or_shown_to_the_model(self, server: ProtocolServer) -> None:
        async with episode(server) as env:
            with pytest.raises(ExecutionFailed, match="EXECUTION_ERROR: division by zero"):
                await env.step_async("crash")
        async with episode(server, execution_error="tell") as env:
            assert "division by zero" in message_text(await env.step_async("crash"))
            assert "hello" in message_text(await env.step_async("hello"))
            assert env.get_metrics()["invalid_actions"] == 1

    async def test_an_environment_that_cannot_be_made_or_reset(self, server: ProtocolServer) -> None:
        with ProtocolServer(Broken) as broken, pytest.raises(SessionRefused, match="FACTORY_ERROR: no memory"):
            await episode(broken).__aenter__()
        with pytest.raises(ExecutionFailed, match="cannot be reset"):
            await episode(server, reset={"greeting": "crash"}).__aenter__()
        with pytest.raises(ProtocolError, match="done=true"):
            await episode(server, reset={"done": True}).__aenter__()
        assert server.n_made == 2
        assert all(issubclass(error, OpenEnvError) for error in (ExecutionFailed, ProtocolError, SessionRefused))

    async def test_unreachable_server(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            env = OpenEnvEnv({"url": f"ws://127.0.0.1:{taken.getsockname()[1]}", "action": {"text_field": "m"}}, {})
            with pytest.raises(ServerUnavailable, match="cannot open a session on ws://127"):
                await env.init_async(PROMPT)
            await env.close_async()
        await wait_for_no_tasks()

    async def test_wrong_order_of_calls_raises(self, server: ProtocolServer) -> None:
        env = make_env(server)
        with pytest.raises(RuntimeError, match="init"):
            await env.step_async("hello")
        await env.init_async(PROMPT)
        with pytest.raises(RuntimeError, match="started"):
            await env.init_async(PROMPT)
        await env.close_async()

    async def test_session_can_be_closed_from_another_thread_or_after_its_loop(self, server: ProtocolServer) -> None:
        async with episode(server) as env:
            await asyncio.to_thread(env.close)
            await wait_for_no_tasks()
            await wait_until_async(lambda: not server.n_open)
        for close in (OpenEnvEnv.close, lambda env: asyncio.run(env.close_async())):
            env = make_env(server)
            await asyncio.to_thread(asyncio.run, env.init_async(PROMPT))
            await asyncio.to_thread(close, env)


class TestSettings:
    @pytest.mark.parametrize(
        ("env_config", "message"),
        [
            ({}, r"openenv\.url is missing"),
            ({"url": "localhost:8000"}, r"url='localhost:8000' is not a server's address"),
            ({"url": "http://h", "action": {"field": "x"}}, r"action\.field is unknown; known: fixed, format"),
            ({"url": "http://h", "action": {"format": "xml"}}, r"action\.format='xml'"),
            ({"url": "http://h", "execution_error": "ask"}, r"execution_error='ask' is unknown; use raise or tell"),
            ({"url": "http://h", "message_timeout_s": 0}, r"message_timeout_s=0 must be"),
            ({"url": "http://h", "max_sessions": 0}, r"max_sessions=0 must be"),
        ],
    )
    def test_invalid_config_raises(self, env_config: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            OpenEnvEnv(env_config, {})
        with pytest.raises(ValueError, match="reset='now' of a dataset row must be a dict"):
            OpenEnvEnv({"url": "http://h"}, {"reset": "now"})
