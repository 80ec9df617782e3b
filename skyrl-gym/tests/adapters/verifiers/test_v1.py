import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from gym_kit.messages import call, message_text, user
from gym_kit.processes import wait_for_no_tasks
from gym_kit.texts import TAGGED_TEXTS
from gym_kit.verifiers_contract import VerifiersContract, make_env, make_row, play
from hypothesis import HealthCheck, given, settings

from skyrl_gym.adapters.verifiers import rows
from skyrl_gym.adapters.verifiers.turn import VerifiersError, parse_reply

pytestmark = pytest.mark.usefixtures("verifiers_packages")

CACHE = Path.home() / ".cache" / "verifiers" / "runtimes" / "subprocess"
TASKS = """
import verifiers.v1 as vf
__all__ = ["Tasks"{exported}]
class OnlyTask(vf.Task[vf.TaskData]):
    {body}
class Tasks(vf.Taskset[OnlyTask]):
    def load(self):
        yield OnlyTask(vf.TaskData({task}), self.config.task)
{more}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """Return a function that writes a module for the duration of the test: `package("my_env", source)`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(dedent(source))
        names.append(name)
        return name.replace("_", "-")

    yield write
    for name in names:
        sys.modules.pop(name, None)


class TestContract(VerifiersContract):
    """Tasksets, with the installed verifiers. The folder `verifiers_v0` tests `load_environment`."""

    sums = "arithmetic-v1"
    game = "guessing-v1"


class TestRows:
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

    def test_arguments_of_a_taskset(self) -> None:
        with pytest.raises(ValueError, match="guessing-v1 generates tasks forever; set n_rows"):
            rows("guessing-v1")
        assert [row["extra_info"]["example_id"] for row in rows("guessing-v1", n_rows=3)] == [0, 1, 2]
        assert make_row("guessing-v1", args={"opens": False})["prompt"] == user("A game.")  # without a prompt
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


class TestRewards:
    async def test_weighted_rewards_of_replies_without_thoughts(self) -> None:
        output, env = await play(make_row("arithmetic-v1", 2), "4")
        assert output["metadata"]["reward_components"] == {"correct": 2.0, "short": 0.5, "polite": 0.0, "watched": 0.0}
        assert output["reward"] == 2.5
        scores = {"correct": 1.0, "short": 1.0, "polite": 0.0, "watched": 7.0, "thoughts": 0.0}
        assert env.get_metrics() == {**scores, "steps": 1, "invalid_actions": 0}
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
        with pytest.raises(VerifiersError, match=message):
            await play(make_row("arithmetic-v1", 2), "4", args={"task": {"fault": fault}})
        await wait_for_no_tasks()

    async def test_arguments_in_the_config_override_the_row(self) -> None:
        row = make_row("arithmetic-v1", 3, args={"n_tasks": 4, "task": {"fault": "raise"}})
        assert (await play(row, "6", args={"n_tasks": 1, "task": {"fault": ""}}))[0]["reward"] == 2.5
        with pytest.raises(VerifiersError, match="asleep"):
            await play(row, "6", args={"n_tasks": 1})


class TestGame:
    async def test_environment_may_send_the_first_message(self) -> None:
        row = make_row("guessing-v1", 1, args={"opens": False})
        env = make_env(row)
        prompt, _ = await env.init_async(row["prompt"])
        assert prompt == user("I think of a number.")
        assert message_text(await env.step_async("9")) == "Too high."
        assert message_text(await env.step_async("<think>9</think>1")) == "Too low."
        assert (await env.step_async("2"))["reward"] == 1.0
        assert env.get_metrics()["guesses"] == 3.0
        assert env.get_metrics()["tokens"] > 0  # recorded by `finalize`
        await env.close_async()

    async def test_folders_are_removed(self) -> None:
        before = set(CACHE.iterdir()) if CACHE.exists() else set()
        row = make_row("guessing-v1")
        env = make_env(row)
        await env.init_async(row["prompt"])
        assert len(set(CACHE.iterdir()) - before) == 1
        await env.step_async("7")
        await env.close_async()
        assert set(CACHE.iterdir()) <= before

    @pytest.mark.parametrize("is_started", [False, True])
    async def test_init_and_step_can_be_cancelled(self, is_started: bool) -> None:
        row = make_row("guessing-v1")
        env = make_env(row)
        if is_started:
            await env.init_async(row["prompt"])
        task = asyncio.create_task(env.step_async("7") if is_started else env.init_async(row["prompt"]))  # type: ignore[arg-type]
        await asyncio.sleep(0 if is_started else 0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await env.close_async()
        await wait_for_no_tasks()

    @pytest.mark.parametrize(
        ("fault", "error", "message"),
        [("run", ConnectionError, "no dice"), ("twice", RuntimeError, "'player' started a second conversation")],
    )
    async def test_errors_of_the_environment_are_propagated(
        self, fault: str, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            await play(make_row("guessing-v1"), "1", env={"fault": fault})
        await wait_for_no_tasks()


async def test_tools_are_described_and_called() -> None:
    """verifiers starts a process for tools, which takes seconds."""
    row = make_row("library-v1")
    env = make_env(row, max_turns=6)
    prompt, _ = await env.init_async(row["prompt"])
    assert [message["role"] for message in prompt] == ["system", "user"]
    assert '"name": "library_look_up"' in prompt[0]["content"]
    assert '"word"' in prompt[0]["content"]

    look_up = call("library_look_up", word="it")
    found, burnt = message_text(await env.step_async(f"I look. {look_up}\n{call('library_burn')}")).split(
        "</tool_response>\n<tool_response>"
    )
    assert found.startswith("<tool_response>\nit means ANSWER: 42")
    assert "it does not burn" in burnt
    unknown = message_text(await env.step_async(call("fly")))
    assert "There is no tool 'fly'. Tools: library_burn, library_look_up." in unknown
    assert "Field required" in message_text(await env.step_async(call("library_look_up", words=1)))
    unreadable = message_text(await env.step_async('ANSWER: 42 <tool_call>{"name": </tool_call>'))
    assert unreadable.startswith("The tool call is not valid JSON")
    large = message_text(await env.step_async(call("library_look_up", word="it", n_lines=100_000)))
    assert len(large) < 30_000

    output = await env.step_async(f"ANSWER: 42 {look_up}")  # the last turn is scored, but its call is not executed
    assert (output["done"], output["reward"], output["observations"]) == (True, 1.0, [])
    metrics = env.get_metrics()
    assert (metrics["lookups"], metrics["steps"], metrics["invalid_actions"]) == (3.0, 6, 1)
    await env.close_async()
    await wait_for_no_tasks()


def tasks_source(**parts: str) -> str:
    """Return the source of a package with one task: its `body`, its data, and `more` classes with `exported` names."""
    return TASKS.format(**{"body": "pass", "task": 'prompt="Hello"', "exported": "", "more": ""} | parts)


DUET = """
class DuetConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()
class DuetEnv(vf.Env[DuetConfig]):
    async def run(self, task, agents): ...
"""
OWN = """
class OwnConfig(vf.HarnessConfig): pass
class OwnHarness(vf.Harness[OwnConfig]):
    async def launch(self, *args, **kwargs): ...
"""
PICTURE = '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]'


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "parts", "message"),
        [
            ("boxed", {"body": "NEEDS_CONTAINER = True"}, r"OnlyTask needs a container \(NEEDS_CONTAINER\)"),
            ("pictures", {"task": f"prompt={PICTURE}"}, "a part of type 'image_url'; the model reads only text"),
            ("duet", {"more": DUET, "exported": ', "DuetEnv"'}, "DuetEnv has the agents proposer, solver, and a chat"),
            ("own", {"more": OWN, "exported": ', "OwnHarness"'}, r"OwnConfig \(own_v1\).*agent\.harness\.id="),
        ],
    )
    def test_unsupported_taskset(self, package: Any, name: str, parts: dict[str, str], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            list(rows(package(f"{name}_v1", tasks_source(**parts))))

    @pytest.mark.parametrize(
        ("name", "data", "error", "message"),
        [
            ("skilled", 'skills=["folder"]', ValueError, "Harness 'null' has no native skill support"),
            ("imaged", 'image="python:3.12"', ValueError, r"requires image 'python:3\.12'"),
            ("unpaid", "", VerifiersError, r"unpaid_v1 \(OnlyTask\) was not scored: no reward"),
        ],
    )
    async def test_unsupported_task(
        self, package: Any, name: str, data: str, error: type[Exception], message: str
    ) -> None:
        env_id = package(f"{name}_v1", tasks_source(task=f'prompt="Hello", {data}'))
        with pytest.raises(error, match=message):
            await play(make_row(env_id), "Hello")

    def test_other_harnesses_and_runtimes(self, package: Any) -> None:
        env_id = package("other_v1", tasks_source(more=OWN, exported=', "OwnHarness"'))
        assert len(list(rows(env_id, env={"agent": {"harness": {"id": "null"}}}))) == 1
        with pytest.raises(ValueError, match="SingleAgentEnv plays agent with BashHarnessConfig"):
            rows("arithmetic-v1", env={"agent": {"harness": {"id": "bash"}}})
        with pytest.raises(ValueError, match="runs agent in DockerConfig, and a chat in none"):
            rows("arithmetic-v1", env={"agent": {"runtime": {"type": "docker"}}})


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TAGGED_TEXTS)
def test_wire_format_round_trip(text: str) -> None:
    """Otherwise environments would appear to rewrite every conversation."""
    from verifiers.v1.dialects.chat import message_to_wire, parse_message

    from skyrl_gym.adapters.verifiers.agent import to_answer

    message = to_answer(parse_reply(text, [{"type": "function", "function": {"name": "f"}}]), 1).message
    assert parse_message(json.loads(json.dumps(message_to_wire(message)))) == message
