import asyncio

import pytest
from gym_kit.messages import call, message_text, user
from gym_kit.processes import wait_for_no_tasks
from gym_kit.verifiers_contract import VerifiersContract, make_env, make_row, play

from skyrl_gym.adapters.verifiers import rows
from skyrl_gym.adapters.verifiers.turn import VerifiersError
from skyrl_gym.runtime.validation import validate_step_output

pytestmark = pytest.mark.usefixtures("verifiers_packages")


@pytest.fixture(scope="session", autouse=True)
def no_progress_bars() -> None:
    """Disable progress bars, whose thread lives until the process ends."""
    import datasets

    datasets.disable_progress_bars()


class TestContract(VerifiersContract):
    """Packages with `load_environment`."""

    sums = "arithmetic-v0"
    game = "guessing-v0"


class TestPackages:
    def test_arguments_of_rows(self) -> None:
        with pytest.raises(ImportError, match=r"textarena is a taskset, which needs verifiers>=0\.4"):
            rows("textarena")
        assert len(list(rows("arithmetic-v0", split="train"))) == 3
        assert len(list(rows("arithmetic-v0", split="eval"))) == 1
        with pytest.raises(ValueError, match="is for v1, but arithmetic-v0 is v0; use args"):
            rows("arithmetic-v0", env={"timeout": 1})

    async def test_group_plays_the_member_of_the_row(self) -> None:
        mixed = list(rows("mixture-v0"))
        assert {row["data_source"] for row in mixed} == {"mixture-v0/sums/plain", "mixture-v0/games/guessing"}
        assert (await play(mixed[1], "2"))[0]["reward"] == 2.5
        assert (await play(mixed[4], "1", "2"))[0]["reward"] == 1.0


class TestRewards:
    async def test_weights_and_arguments_of_reward_functions(self) -> None:
        output, env = await play(make_row("arithmetic-v0", 2), "4")
        assert output["metadata"]["reward_components"] == {"correct": 2.0, "from_row": 0.5}
        assert output["reward"] == 2.5
        scores = {"correct": 1.0, "length": 1.0, "from_row": 1.0, "num_turns": 1.0, "failed_reward_functions": 0}
        assert env.get_metrics() == {**scores, "steps": 1, "invalid_actions": 0}

    async def test_reward_function_fails_with_0_or_a_connection_error(self) -> None:
        row = make_row("arithmetic-v0", 2, args={"functions": ["judged"]})
        output, env = await play(row, "four")
        assert (output["reward"], env.get_metrics()["failed_reward_functions"]) == (0.5, 1)
        output, env = await play(row, "4")
        assert (output["reward"], env.get_metrics()["failed_reward_functions"]) == (2.75, 0)
        with pytest.raises(VerifiersError, match=r"function of arithmetic_v0 failed: RuntimeError\('no verdict'\)"):
            await play(row, "asleep")

    async def test_failures_are_separate_between_rollouts(self) -> None:
        row = make_row("arithmetic-v0", 2, args={"functions": ["judged"]})
        results = await asyncio.gather(*(play(row, text) for text in ["4", "asleep"] * 8), return_exceptions=True)
        assert [isinstance(result, VerifiersError) for result in results] == [False, True] * 8

    def test_rubrics_without_a_reward_of_each_rollout_are_refused(self) -> None:
        message = r"\(SingleTurnEnv\) rewards rollouts in comparison with others, by best,"
        for args, problem in (({"functions": ["best"]}, message), ({"score_rollouts": False}, "score_rollouts=False")):
            with pytest.raises(ValueError, match=problem):
                make_env(make_row("arithmetic-v0", args=args))


class TestGame:
    async def test_the_environment_may_rewrite_the_conversation(self) -> None:
        row = make_row("guessing-v0", 1, args={"fault": "forget"})
        output, _ = await play(row, "7", "8")
        assert output["metadata"]["modified_chat_history"] == user("Guess my number.")
        assert message_text(output) == "Wrong, and that was guess 2."

    async def test_environment_may_keep_a_single_message(self) -> None:
        output, _ = await play(make_row("guessing-v0", 1, args={"fault": "forget all"}), "7", "8")
        assert validate_step_output(output)["observations"] == []
        history = user("Wrong, and that was guess 2.")
        assert output["metadata"]["modified_chat_history"] == history

    @pytest.mark.parametrize(
        ("fault", "error", "message"),
        [
            ("setup", VerifiersError, r"guessing_v0: SandboxError: no sandbox"),
            ("step", VerifiersError, r"guessing_v0: SandboxError: the sandbox died"),
            ("other", VerifiersError, r"guessing_v0: Error: odd"),
            ("bug", KeyError, "board"),
        ],
    )
    async def test_failures_raise_and_are_cleaned_up(self, fault: str, error: type[Exception], message: str) -> None:
        import guessing_v0

        n_before = len(guessing_v0.log)
        with pytest.raises(error, match=message):
            await play(make_row("guessing-v0", args={"fault": fault}), "7", "8")
        assert guessing_v0.log[n_before:] == ["put away 1"]
        await wait_for_no_tasks()


class TestTools:
    async def test_tools_are_described_and_called(self) -> None:
        row = make_row("calculator-v0")
        env = make_env(row)
        prompt, _ = await env.init_async(row["prompt"])
        assert [message["role"] for message in prompt] == ["system", "user"]
        assert '"name": "add"' in prompt[0]["content"]
        assert "notes" not in prompt[0]["content"]

        both = message_text(await env.step_async(f"I add. {call('add', a=2, b=3)}{call('fail', text='milk')}"))
        assert both == "<tool_response>\n5\n</tool_response>\n<tool_response>\nno milk\n</tool_response>"
        assert "1 notes" in message_text(await env.step_async(call("remember", text="a")))
        assert "2 notes" in message_text(await env.step_async(call("remember", text="b")))
        unreadable = message_text(await env.step_async('ANSWER: 5 <tool_call>{"name": </tool_call>'))
        assert unreadable.startswith("The tool call is not valid JSON")

        output = await env.step_async("ANSWER: 5")
        assert (output["done"], output["reward"]) == (True, 1.0)
        metrics = env.get_metrics()
        assert (metrics["total_tool_calls"], metrics["remember_calls"], metrics["num_turns"]) == (4.0, 2.0, 5.0)
        assert (metrics["steps"], metrics["invalid_actions"]) == (5, 1)
        await env.close_async()

    async def test_invalid_calls_count_as_turns(self) -> None:
        row = make_row("calculator-v0")
        output, _ = await play(row, *["<tool_call>"] * 6)  # its max_turns is 6
        assert (output["done"], output["reward"]) == (True, 0.0)
        output, _ = await play(row, *["<tool_call>"] * 2, max_turns=2)
        assert (output["done"], output["metadata"]["stop_condition"]) == (True, "max_turns_reached")

    async def test_environment_may_stop_at_a_tool_error(self) -> None:
        row = make_row("calculator-v0", args={"stops": True})
        output, _ = await play(row, call("fail", text="milk"))
        assert (output["done"], output["reward"]) == (True, 0.0)
        with pytest.raises(VerifiersError, match="calculator_v0: ToolCallError"):
            await play(row, call("lose", text="milk"))
