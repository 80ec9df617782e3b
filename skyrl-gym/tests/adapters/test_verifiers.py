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

pytest.register_assert_rewrite("adapters.verifiers_contract")

from adapters.verifiers_contract import (  # noqa: E402
    EXAMPLES,
    VerifiersContract,
    env_of,
    no_task_left,
    no_thread_left,
    play,
    row_of,
    text_of,
)

from skyrl_gym.adapters.verifiers import rows  # noqa: E402
from skyrl_gym.adapters.verifiers_turn import Turn, VerifiersError, chat_messages, next_turn, read_reply  # noqa: E402

CACHE = Path.home() / ".cache" / "verifiers" / "runtimes" / "subprocess"
LOOK_UP = '<tool_call>{"name": "library_look_up", "arguments": {"word": "it"}}</tool_call>'


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module, and removes it in the end: `package("my_env", source)`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written = []

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(dedent(source))
        written.append(name)
        return name.replace("_", "-")

    yield write
    for name in written:
        sys.modules.pop(name, None)


class TestContract(VerifiersContract):
    """Tasksets, with verifiers as it is installed. See `verifiers_v0` for `load_environment`."""

    sums = "arithmetic-v1"
    game = "guessing-v1"


class V1:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))


class TestFirstGeneration(V1):
    @pytest.mark.parametrize("env_id", ["arithmetic-v0", "guessing-v0", "calculator-v0"])
    def test_it_needs_an_older_verifiers(self, env_id: str) -> None:
        """One of the packages fails when it is imported, the others when they are loaded."""
        with pytest.raises(ImportError, match=rf"{env_id} is .*'verifiers<0\.3' .*environment\.skyrl_gym\.python"):
            rows(env_id)

    def test_other_errors_of_a_package_are_its_own(self, package: Any) -> None:
        with pytest.raises(AttributeError, match="'list' object has no attribute 'push'"):
            rows(package("broken_one", "[].push(1)"))
        with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
            rows(package("broken_two", "import no_such_dependency"))


class TestRows(V1):
    def test_a_taskset_without_an_end_needs_a_number_of_rows(self) -> None:
        with pytest.raises(ValueError, match="guessing-v1 makes tasks forever; say how many with n_rows"):
            rows("guessing-v1")
        assert [row["extra_info"]["example_id"] for row in rows("guessing-v1", n_rows=3)] == [0, 1, 2]

    def test_a_task_without_a_prompt_has_its_description(self) -> None:
        row = row_of("guessing-v1", args={"opens": False})
        assert row["prompt"] == [{"role": "user", "content": "A game."}]

    def test_wrong_arguments_are_named(self) -> None:
        with pytest.raises(ValueError, match="n_taks"):
            rows("arithmetic-v1", {"n_taks": 1})

    def test_what_json_leaves_out_cannot_be_kept(self, package: Any) -> None:
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
        with pytest.raises(ValueError, match="Data leaves secret out of its JSON"):
            rows(package("secrets_v1", source))


class TestRewards(V1):
    async def test_each_has_its_weight(self) -> None:
        output, env = await play(row_of("arithmetic-v1", 2), "4")
        assert output["metadata"]["reward_components"] == {"correct": 2.0, "short": 0.5, "polite": 0.0, "watched": 0.0}
        assert output["reward"] == 2.5
        scores = {"correct": 1.0, "short": 1.0, "polite": 0.0, "watched": 7.0, "thoughts": 0.0}
        assert env.get_metrics() == {**scores, "steps": 1, "invalid_actions": 0}

    async def test_thoughts_are_no_part_of_the_reply(self) -> None:
        output, env = await play(row_of("arithmetic-v1", 2), "<think>\n2 + 2 is 4, please\n</think>\n\n4")
        assert output["reward"] == 2.5
        assert env.get_metrics()["thoughts"] == len("2 + 2 is 4, please")
        output, env = await play(row_of("arithmetic-v1", 2), "<think>4")
        assert env.get_metrics()["correct"] == 0.0

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("raise", r"arithmetic_v1 \(ArithmeticTask\): TaskError: .*ConnectionError: the judge is asleep"),
            ("nan", "the reward of arithmetic_v1 .* is nan"),
        ],
    )
    async def test_what_cannot_be_scored_raises(self, fault: str, message: str) -> None:
        row = row_of("arithmetic-v1", 2)
        with pytest.raises(VerifiersError, match=message):
            await play(row, "4", args={"task": {"fault": fault}})
        await no_task_left()

    async def test_a_task_without_rewards_raises(self, package: Any) -> None:
        source = """
            import verifiers.v1 as vf
            __all__ = ["Tasks"]
            class Tasks(vf.Taskset[vf.Task[vf.TaskData]]):
                def load(self):
                    yield vf.Task(vf.TaskData(prompt="Hello"), self.config.task)
        """
        with pytest.raises(VerifiersError, match=r"unpaid_v1 \(Task\) was not scored: no reward"):
            await play(row_of(package("unpaid_v1", source)), "Hello")

    async def test_arguments_of_the_configuration_come_on_top(self) -> None:
        row = row_of("arithmetic-v1", 3, args={"n_tasks": 4})
        with pytest.raises(VerifiersError, match="asleep"):
            await play(row, "6", args={"task": {"fault": "raise"}})
        assert (await play(row, "6", args={"n_tasks": 1}))[0]["reward"] == 2.5
        row = row_of("arithmetic-v1", args={"task": {"fault": "raise"}})
        assert (await play(row, "0", args={"task": {"fault": ""}}))[0]["reward"] == 2.5


class TestGame(V1):
    async def test_the_environment_may_speak_first(self) -> None:
        row = row_of("guessing-v1", 1, args={"opens": False})
        env = env_of(row)
        prompt, _ = await env.init_async(row["prompt"])
        assert prompt == [{"role": "user", "content": "I think of a number."}]
        assert text_of(await env.step_async("9")) == "Too high."
        assert text_of(await env.step_async("<think>9</think>1")) == "Too low."
        assert (await env.step_async("2"))["reward"] == 1.0
        await env.close_async()

    async def test_what_finalize_records_is_a_metric(self) -> None:
        _, env = await play(row_of("guessing-v1"), "1")
        assert env.get_metrics()["guesses"] == 1.0
        assert env.get_metrics()["tokens"] > 0

    async def test_folders_are_removed(self) -> None:
        before = set(CACHE.iterdir()) if CACHE.exists() else set()
        row = row_of("guessing-v1")
        env = env_of(row)
        await env.init_async(row["prompt"])
        assert len(set(CACHE.iterdir()) - before) == 1
        await env.step_async("7")
        await env.close_async()
        assert set(CACHE.iterdir()) <= before

    async def test_a_step_can_be_cancelled(self) -> None:
        row = row_of("guessing-v1")
        env = env_of(row)
        await env.init_async(row["prompt"])
        step = asyncio.create_task(env.step_async("7"))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await env.close_async()
        await no_task_left()

    async def test_init_can_be_cancelled(self) -> None:
        row = row_of("guessing-v1")
        env = env_of(row)
        began = asyncio.create_task(env.init_async(row["prompt"]))
        await asyncio.sleep(0.002)
        began.cancel()
        with pytest.raises(asyncio.CancelledError):
            await began
        await no_task_left()

    async def test_what_the_environment_raises_is_raised(self) -> None:
        row = row_of("guessing-v1")
        with pytest.raises(ConnectionError, match="no dice"):
            await play(row, "1", env={"fault": "run"})
        await no_task_left()

    async def test_a_second_conversation_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match="'player' begins a second conversation"):
            await play(row_of("guessing-v1"), "1", env={"fault": "twice"})
        await no_task_left()

    def test_a_failure_by_hand_leaves_nothing(self) -> None:
        row = row_of("guessing-v1")
        with no_thread_left(), pytest.raises(ConnectionError):
            env_of(row, env={"fault": "run"}).init(row["prompt"])


class TestTools(V1):
    """Verifiers starts a process for the tools of a task, which takes seconds."""

    async def test_tools_are_told_called_and_answered(self) -> None:
        row = row_of("library-v1")
        env = env_of(row)
        prompt, _ = await env.init_async(row["prompt"])
        assert [message["role"] for message in prompt] == ["system", "user"]
        assert '"name": "library_look_up"' in prompt[0]["content"]
        assert '"word"' in prompt[0]["content"]

        both = text_of(await env.step_async(f'I look. {LOOK_UP}\n<tool_call>{{"name": "library_burn"}}</tool_call>'))
        found, burnt = both.split("</tool_response>\n<tool_response>")
        assert found.startswith("<tool_response>\nit means ANSWER: 42")
        assert "it does not burn" in burnt
        assert "There is no tool 'fly'." in text_of(await env.step_async('<tool_call>{"name": "fly"}</tool_call>'))
        wrong = '<tool_call>{"name": "library_look_up", "arguments": {"words": 1}}</tool_call>'
        assert "Field required" in text_of(await env.step_async(wrong))
        unreadable = text_of(await env.step_async('ANSWER: 42 <tool_call>{"name": </tool_call>'))
        assert unreadable.startswith("The tool call is not valid JSON")
        large = '<tool_call>{"name": "library_look_up", "arguments": {"word": "it", "n_lines": 100000}}</tool_call>'
        assert len(text_of(await env.step_async(large))) < 30_000

        output = await env.step_async("<think>the tool said ANSWER: 42</think>I do not know.")
        assert (output["done"], output["reward"]) == (True, 0.0)
        metrics = env.get_metrics()
        assert (metrics["lookups"], metrics["steps"], metrics["invalid_actions"]) == (2.0, 6, 1)
        await env.close_async()
        await no_task_left()

    async def test_the_last_turn_is_scored_even_if_it_calls(self) -> None:
        output, env = await play(row_of("library-v1"), f"ANSWER: 42 {LOOK_UP}", max_turns=1, describe_tools=False)
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
            await play(row_of(package("skilled_v1", source)), "Hello")

    async def test_images_of_a_task(self, package: Any) -> None:
        source = self.source().replace('prompt="Hello"', 'prompt="Hello", image="python:3.12"')
        with pytest.raises(ValueError, match=r"requires image 'python:3\.12'"):
            await play(row_of(package("imaged_v1", source)), "Hello")

    def test_several_agents(self, package: Any) -> None:
        more = """
            class DuetConfig(vf.EnvConfig):
                proposer: vf.AgentConfig = vf.AgentConfig()
                solver: vf.AgentConfig = vf.AgentConfig()
            class DuetEnv(vf.Env[DuetConfig]):
                async def run(self, task, agents): ...
        """
        with pytest.raises(ValueError, match="DuetEnv has the agents proposer, solver; only environments of one agent"):
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
    def test_it_comes_back_from_the_wire_as_it_went(self, text: str) -> None:
        """Else an environment would seem to rewrite every conversation."""
        from verifiers.v1.dialects.chat import message_to_wire, parse_message

        from skyrl_gym.adapters.verifiers_agent import answer_of

        message = answer_of(read_reply(text, has_tools=True), 1).message
        assert parse_message(json.loads(json.dumps(message_to_wire(message)))) == message

    @given(REPLIES)
    def test_calls_are_read_only_where_there_are_tools(self, text: str) -> None:
        reply = read_reply(text, has_tools=False)
        assert (reply.calls, reply.problem) == ((), None)
        reply.text.encode()


class TestTurn:
    def test_results_and_what_the_user_says_after_them_are_one_message(self) -> None:
        messages = [
            {"role": "user", "content": "Go."},
            {"role": "user", "content": "On."},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]},
            {"role": "tool", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
            {"role": "tool", "content": "3\ud800"},
            {"role": "user", "content": "Well?"},
        ]
        assert chat_messages(messages) == [
            {"role": "user", "content": "Go."},
            {"role": "user", "content": "On."},
            {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'},
            {
                "role": "user",
                "content": "<tool_response>\n1\n2\n</tool_response>\n<tool_response>\n3?\n</tool_response>\nWell?",
            },
        ]

    def test_thoughts_and_calls_that_are_written_already_stay(self) -> None:
        call = "<tool_call>{}</tool_call>"
        message = {"role": "assistant", "content": call, "reasoning_content": "hm", "tool_calls": [{"name": "f"}]}
        assert chat_messages([message]) == [{"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{call}"}]

    def test_a_conversation_goes_on_or_is_rewritten(self) -> None:
        before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        went_on = next_turn(before, [*before, {"role": "user", "content": "c"}], [])
        assert went_on.observations() == [{"role": "user", "content": "c"}]
        rewritten = next_turn(before, [{"role": "user", "content": "c"}], [])
        assert rewritten == Turn([{"role": "user", "content": "c"}], 0, [])
