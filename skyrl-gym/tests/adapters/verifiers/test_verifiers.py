from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.register_assert_rewrite("adapters.verifiers.contract")

from adapters.verifiers.contract import (  # noqa: E402
    EXAMPLES,
    VerifiersContract,
    check_no_threads_left,
    make_env,
    make_row,
    message_text,
    play,
    wait_for_no_tasks,
)

from skyrl_gym.adapters.verifiers import rows  # noqa: E402
from skyrl_gym.adapters.verifiers.turn import ChatTurn, VerifiersError, chat_messages, next_turn, parse_reply  # noqa: E402

CACHE = Path.home() / ".cache" / "verifiers" / "runtimes" / "subprocess"
LOOK_UP = '<tool_call>{"name": "library_look_up", "arguments": {"word": "it"}}</tool_call>'


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that writes a module for the duration of the test: `package("my_env", source)`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    records = []

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(dedent(source))
        records.append(name)
        return name.replace("_", "-")

    yield write
    for name in records:
        sys.modules.pop(name, None)


class TestContract(VerifiersContract):
    """Tasksets, with the installed verifiers. The folder `verifiers_v0` tests `load_environment`."""

    sums = "arithmetic-v1"
    game = "guessing-v1"


class V1:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))


class TestFirstGeneration(V1):
    @pytest.mark.parametrize("env_id", ["arithmetic-v0", "guessing-v0", "calculator-v0"])
    def test_first_generation_needs_an_older_verifiers(self, env_id: str) -> None:
        """One package fails on import, the others when they are loaded."""
        with pytest.raises(ImportError, match=rf"{env_id} is .*'verifiers<0\.3' .*environment\.skyrl_gym\.python"):
            rows(env_id)

    def test_other_errors_of_a_package_are_propagated(self, package: Any) -> None:
        with pytest.raises(AttributeError, match="'list' object has no attribute 'push'"):
            rows(package("broken_one", "[].push(1)"))
        with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
            rows(package("broken_two", "import no_such_dependency"))


class TestRows(V1):
    def test_infinite_taskset_needs_n_rows(self) -> None:
        with pytest.raises(ValueError, match="guessing-v1 generates tasks forever; set n_rows"):
            rows("guessing-v1")
        assert [row["extra_info"]["example_id"] for row in rows("guessing-v1", n_rows=3)] == [0, 1, 2]

    def test_a_task_without_a_prompt_has_its_description(self) -> None:
        row = make_row("guessing-v1", args={"opens": False})
        assert row["prompt"] == [{"role": "user", "content": "A game."}]

    def test_wrong_arguments_are_named(self) -> None:
        with pytest.raises(ValueError, match="n_taks"):
            rows("arithmetic-v1", {"n_taks": 1})

    def test_data_excluded_from_json_is_refused(self, package: Any) -> None:
        source = """
            import verifiers.v1 as vf
            from pydantic import Field
            __all__ = ["Tasks"]
            class Data(vf.TaskData):
                secret: str = Field("", exclude=True)
            class SecretTask(vf.Task[Data]):
                pass
            class Tasks(vf.Taskset[SecretTask]):
                def load(self):
                    return []
        """
        with pytest.raises(ValueError, match="Data excludes secret from its JSON"):
            rows(package("secrets_v1", source))


class TestRewards(V1):
    async def test_weighted_rewards(self) -> None:
        output, env = await play(make_row("arithmetic-v1", 2), "4")
        assert output["metadata"]["reward_components"] == {"correct": 2.0, "short": 0.5, "polite": 0.0, "watched": 0.0}
        assert output["reward"] == 2.5
        scores = {"correct": 1.0, "short": 1.0, "polite": 0.0, "watched": 7.0, "thoughts": 0.0}
        assert env.get_metrics() == {**scores, "steps": 1, "invalid_actions": 0}

    async def test_thoughts_are_separated_from_the_reply(self) -> None:
        output, env = await play(make_row("arithmetic-v1", 2), "<think>\n2 + 2 is 4, please\n</think>\n\n4")
        assert output["reward"] == 2.5
        assert env.get_metrics()["thoughts"] == len("2 + 2 is 4, please")
        output, env = await play(make_row("arithmetic-v1", 2), "<think>4")
        assert env.get_metrics()["correct"] == 0.0

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("raise", r"arithmetic_v1 \(ArithmeticTask\): TaskError: .*ConnectionError: the judge is asleep"),
            ("nan", "the reward of arithmetic_v1 .* is nan"),
        ],
    )
    async def test_unscored_rollout_raises(self, fault: str, message: str) -> None:
        row = make_row("arithmetic-v1", 2)
        with pytest.raises(VerifiersError, match=message):
            await play(row, "4", args={"task": {"fault": fault}})
        await wait_for_no_tasks()

    async def test_a_task_without_rewards_raises(self, package: Any) -> None:
        source = """
            import verifiers.v1 as vf
            __all__ = ["Tasks"]
            class Tasks(vf.Taskset[vf.Task[vf.TaskData]]):
                def load(self):
                    yield vf.Task(vf.TaskData(prompt="Hello"), self.config.task)
        """
        with pytest.raises(VerifiersError, match=r"unpaid_v1 \(Task\) was not scored: no reward"):
            await play(make_row(package("unpaid_v1", source)), "Hello")

    async def test_arguments_in_the_config_override_the_row(self) -> None:
        row = make_row("arithmetic-v1", 3, args={"n_tasks": 4})
        with pytest.raises(VerifiersError, match="asleep"):
            await play(row, "6", args={"task": {"fault": "raise"}})
        assert (await play(row, "6", args={"n_tasks": 1}))[0]["reward"] == 2.5
        row = make_row("arithmetic-v1", args={"task": {"fault": "raise"}})
        assert (await play(row, "0", args={"task": {"fault": ""}}))[0]["reward"] == 2.5


class TestGame(V1):
    async def test_environment_may_send_the_first_message(self) -> None:
        row = make_row("guessing-v1", 1, args={"opens": False})
        env = make_env(row)
        prompt, _ = await env.init_async(row["prompt"])
        assert prompt == [{"role": "user", "content": "I think of a number."}]
        assert message_text(await env.step_async("9")) == "Too high."
        assert message_text(await env.step_async("<think>9</think>1")) == "Too low."
        assert (await env.step_async("2"))["reward"] == 1.0
        await env.close_async()

    async def test_metrics_recorded_by_finalize(self) -> None:
        _, env = await play(make_row("guessing-v1"), "1")
        assert env.get_metrics()["guesses"] == 1.0
        assert env.get_metrics()["tokens"] > 0

    async def test_folders_are_removed(self) -> None:
        before = set(CACHE.iterdir()) if CACHE.exists() else set()
        row = make_row("guessing-v1")
        env = make_env(row)
        await env.init_async(row["prompt"])
        assert len(set(CACHE.iterdir()) - before) == 1
        await env.step_async("7")
        await env.close_async()
        assert set(CACHE.iterdir()) <= before

    async def test_a_step_can_be_cancelled(self) -> None:
        row = make_row("guessing-v1")
        env = make_env(row)
        await env.init_async(row["prompt"])
        step = asyncio.create_task(env.step_async("7"))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await env.close_async()
        await wait_for_no_tasks()

    async def test_init_can_be_cancelled(self) -> None:
        row = make_row("guessing-v1")
        env = make_env(row)
        started = asyncio.create_task(env.init_async(row["prompt"]))
        await asyncio.sleep(0.002)
        started.cancel()
        with pytest.raises(asyncio.CancelledError):
            await started
        await wait_for_no_tasks()

    async def test_errors_of_the_environment_are_propagated(self) -> None:
        row = make_row("guessing-v1")
        with pytest.raises(ConnectionError, match="no dice"):
            await play(row, "1", env={"fault": "run"})
        await wait_for_no_tasks()

    async def test_a_second_conversation_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match="'player' starts a second conversation"):
            await play(make_row("guessing-v1"), "1", env={"fault": "twice"})
        await wait_for_no_tasks()

    def test_failed_blocking_init_leaves_nothing_behind(self) -> None:
        row = make_row("guessing-v1")
        with check_no_threads_left(), pytest.raises(ConnectionError):
            make_env(row, env={"fault": "run"}).init(row["prompt"])


class TestTools(V1):
    """Tests with tools, for which verifiers starts a process in seconds."""

    async def test_tools_are_described_and_called(self) -> None:
        row = make_row("library-v1")
        env = make_env(row)
        prompt, _ = await env.init_async(row["prompt"])
        assert [message["role"] for message in prompt] == ["system", "user"]
        assert '"name": "library_look_up"' in prompt[0]["content"]
        assert '"word"' in prompt[0]["content"]

        both = message_text(
            await env.step_async(f'I look. {LOOK_UP}\n<tool_call>{{"name": "library_burn"}}</tool_call>')
        )
        found, burnt = both.split("</tool_response>\n<tool_response>")
        assert found.startswith("<tool_response>\nit means ANSWER: 42")
        assert "it does not burn" in burnt
        assert "There is no tool 'fly'." in message_text(await env.step_async('<tool_call>{"name": "fly"}</tool_call>'))
        wrong = '<tool_call>{"name": "library_look_up", "arguments": {"words": 1}}</tool_call>'
        assert "Field required" in message_text(await env.step_async(wrong))
        unreadable = message_text(await env.step_async('ANSWER: 42 <tool_call>{"name": </tool_call>'))
        assert unreadable.startswith("The tool call is not valid JSON")
        large = '<tool_call>{"name": "library_look_up", "arguments": {"word": "it", "n_lines": 100000}}</tool_call>'
        assert len(message_text(await env.step_async(large))) < 30_000

        output = await env.step_async("<think>the tool said ANSWER: 42</think>I do not know.")
        assert (output["done"], output["reward"]) == (True, 0.0)
        metrics = env.get_metrics()
        assert (metrics["lookups"], metrics["steps"], metrics["invalid_actions"]) == (2.0, 6, 1)
        await env.close_async()
        await wait_for_no_tasks()

    async def test_last_turn_is_scored_even_with_a_call(self) -> None:
        output, env = await play(make_row("library-v1"), f"ANSWER: 42 {LOOK_UP}", max_turns=1, describe_tools=False)
        assert (output["done"], output["reward"], output["observations"]) == (True, 1.0, [])
        assert env.get_metrics()["lookups"] == 1.0


class TestRefusals(V1):
    TASKS = """
        import verifiers.v1 as vf
        __all__ = ["Tasks"{exported}]
        class OnlyTask(vf.Task[vf.TaskData]):
            {body}
        class Tasks(vf.Taskset[OnlyTask]):
            def load(self):
                yield OnlyTask(vf.TaskData(prompt="Hello"), self.config.task)
    """

    def source(self, more: str = "", exported: str = "", body: str = "pass") -> str:
        return dedent(self.TASKS).format(exported=exported, body=body) + dedent(more)

    def test_containers(self, package: Any) -> None:
        with pytest.raises(ValueError, match=r"OnlyTask needs a container \(NEEDS_CONTAINER\)"):
            rows(package("boxed_v1", self.source(body="NEEDS_CONTAINER = True")))

    async def test_skills_of_a_task(self, package: Any) -> None:
        source = self.source().replace('prompt="Hello"', 'prompt="Hello", skills=["folder"]')
        with pytest.raises(ValueError, match="Harness 'null' has no native skill support"):
            await play(make_row(package("skilled_v1", source)), "Hello")

    async def test_images_of_a_task(self, package: Any) -> None:
        source = self.source().replace('prompt="Hello"', 'prompt="Hello", image="python:3.12"')
        with pytest.raises(ValueError, match=r"requires image 'python:3\.12'"):
            await play(make_row(package("imaged_v1", source)), "Hello")

    def test_several_agents(self, package: Any) -> None:
        more = """
            class DuetConfig(vf.EnvConfig):
                proposer: vf.AgentConfig = vf.AgentConfig()
                solver: vf.AgentConfig = vf.AgentConfig()
            class DuetEnv(vf.Env[DuetConfig]):
                async def run(self, task, agents): ...
        """
        with pytest.raises(
            ValueError, match="DuetEnv has the agents proposer, solver; only environments with one agent"
        ):
            rows(package("duet_v1", self.source(more, exported=', "DuetEnv"')))

    def test_programs(self, package: Any) -> None:
        more = """
            class OwnConfig(vf.HarnessConfig): pass
            class OwnHarness(vf.Harness[OwnConfig]):
                async def launch(self, *args, **kwargs): ...
        """
        env_id = package("own_v1", self.source(more, exported=', "OwnHarness"'))
        with pytest.raises(
            ValueError, match=r"SingleAgentEnv plays agent with OwnConfig \(own_v1\).*agent\.harness\.id="
        ):
            rows(env_id)
        assert len(list(rows(env_id, env={"agent": {"harness": {"id": "null"}}}))) == 1
        with pytest.raises(ValueError, match="SingleAgentEnv plays agent with BashHarnessConfig"):
            rows("arithmetic-v1", env={"agent": {"harness": {"id": "bash"}}})

    def test_other_runtimes(self) -> None:
        with pytest.raises(ValueError, match="runs agent in DockerConfig; only subprocess"):
            rows("arithmetic-v1", env={"agent": {"runtime": {"type": "docker"}}})

    async def test_pictures(self, package: Any) -> None:
        picture = '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]'
        source = self.source().replace('prompt="Hello"', f"prompt={picture}")
        with pytest.raises(ValueError, match="a part of type 'image_url'; the model reads only text"):
            list(rows(package("pictures_v1", source)))


TAGS = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"}', "\n", "\ud800", "\0"])
REPLIES = st.lists(TAGS | st.text(max_size=5), max_size=12).map("".join)


class TestAnswer:
    @settings(deadline=None)  # the first import of verifiers takes seconds
    @given(REPLIES)
    def test_wire_format_round_trip(self, text: str) -> None:
        """Otherwise environments would appear to rewrite every conversation."""
        from verifiers.v1.dialects.chat import message_to_wire, parse_message

        from skyrl_gym.adapters.verifiers.agent import to_answer

        message = to_answer(parse_reply(text, has_tools=True), 1).message
        assert parse_message(json.loads(json.dumps(message_to_wire(message)))) == message

    @given(REPLIES)
    def test_calls_are_parsed_only_if_there_are_tools(self, text: str) -> None:
        reply = parse_reply(text, has_tools=False)
        assert (reply.calls, reply.problem) == ((), None)
        reply.text.encode()


class TestTurn:
    def test_tool_results_and_the_next_user_message_are_merged(self) -> None:
        messages = [
            {"role": "user", "content": "Go."},
            {"role": "user", "content": "On."},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]},
            {"role": "tool", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
            {"role": "tool", "content": "3"},
            {"role": "user", "content": "Well?"},
        ]
        assert chat_messages(messages) == [
            {"role": "user", "content": "Go."},
            {"role": "user", "content": "On."},
            {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'},
            {
                "role": "user",
                "content": "<tool_response>\n1\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>\nWell?",
            },
        ]

    def test_existing_thoughts_and_calls_are_kept(self) -> None:
        call = "<tool_call>{}</tool_call>"
        message = {"role": "assistant", "content": call, "reasoning_content": "hm", "tool_calls": [{"name": "f"}]}
        assert chat_messages([message]) == [{"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{call}"}]

    def test_next_turn_of_a_continued_or_rewritten_conversation(self) -> None:
        before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        went_on = next_turn(before, [*before, {"role": "user", "content": "c"}], [])
        assert went_on.observations() == [{"role": "user", "content": "c"}]
        rewritten = next_turn(before, [{"role": "user", "content": "c"}], [])
        assert rewritten == ChatTurn([{"role": "user", "content": "c"}], 0, [])
