"""Trajectories of agents: rows of tokens, rewards, failures, limits."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest
from agent_runs import ROW, TOKENIZER, play_one, runner
from scripted_engine import ScriptedEngine, call

from skyrl_agent import AgentConfig, AutoAgentRunner, BaseTask
from skyrl_agent.runner import to_rows
from skyrl_train.errors import DataError, EngineError
from skyrl_train.generators.base import GeneratorInput
from skyrl_train.types import Message


async def test_each_prompt_is_the_previous_one_the_sampled_tokens_and_every_new_message() -> None:
    replies = ["no call", call("code_interpreter", code="print(6 * 7)"), call("finish", answer="Paris")]
    trajectory, engine = await play_one(replies)
    assert trajectory.total_reward == 1.0
    assert trajectory.stop_reason == "FINISH_TOOL"
    (segment,) = trajectory.segments
    for request, turn in zip(engine.requests, segment.turns, strict=True):
        assert request.prompt_ids == segment.token_ids[: segment.n_prompt + turn.start]
    sampled = [token for token, mask in zip(segment.response_ids, segment.loss_mask, strict=True) if mask]
    assert TOKENIZER.decode(sampled) == "".join(f"{reply}<|im_end|>" for reply in replies)
    observed = TOKENIZER.decode(segment.response_ids)
    assert "Your reply has no function call" in observed
    assert "EXECUTION RESULT of [code_interpreter]:\n42" in observed
    assert segment.rewards == [0.0] * (len(segment.rewards) - 1) + [1.0]
    assert engine.n_ended == 1


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([call("finish")], "'answer' is a required property"),
        ([call("finish", answer="Paris", note="x")], "Additional properties are not allowed"),
        ([call("look", query="Paris")], "There is no function look; there are code_interpreter, finish."),
        ([call("finish", answer="Paris") * 2], "Your reply has 2 function calls, and none was carried out"),
        (["<tool_call>{broken</tool_call>"], "is not valid JSON"),
        (["<think>" + call("finish", answer="Rome")], "Your reply has no function call"),
    ],
    ids=["missing", "unknown", "tool", "two", "json", "thought"],
)
async def test_mistakes_of_the_model_are_explained_to_it(replies: list[str], expected: str) -> None:
    trajectory, engine = await play_one([*replies, call("finish", answer="Paris")])
    assert expected in engine.prompts()[1]
    assert trajectory.total_reward == 1.0


async def test_without_tools_the_first_reply_is_the_answer() -> None:
    trajectory, engine = await play_one(["<think>Hm.</think>Paris"], tools=())
    assert (trajectory.total_reward, trajectory.stop_reason) == (1.0, "FINISH")
    assert "function" not in engine.prompts()[0]


@pytest.mark.parametrize(
    ("settings", "replies", "reason"),
    [
        ({"max_iterations": 2}, ["no call"] * 3, "max_iterations_reached"),
        ({"max_response_length": 100}, ["no call" * 50], "CONTEXT_WINDOW_EXCEEDED"),
        ({"max_response_length": 200}, ["no call"] * 9, "CONTEXT_WINDOW_EXCEEDED"),
        ({"context_length": 800}, ["no call"] * 9, "CONTEXT_WINDOW_EXCEEDED"),
    ],
    ids=["turns", "reply", "budget", "context"],
)
async def test_trajectories_that_end_early_are_graded_and_not_trained_on(
    settings: dict[str, Any], replies: list[str], reason: str
) -> None:
    trajectory, _ = await play_one(replies, **settings)
    assert trajectory.is_valid
    assert (trajectory.stop_reason, trajectory.total_reward) == (reason, 0.0)
    assert not any(trajectory.loss_mask)
    (segment,) = trajectory.segments
    assert len(segment.response_ids) <= settings.get("max_response_length", 10**9)
    assert len(segment.token_ids) <= settings.get("context_length", 10**9)
    trained, _ = await play_one(replies, **settings, masked_finish_reasons=())
    assert any(trained.loss_mask)


async def test_a_turn_that_is_cut_off_at_its_own_limit_continues() -> None:
    trajectory, _ = await play_one(["x" * 300, call("finish", answer="Paris")], sampling_params={"max_tokens": 100})
    assert trajectory.total_reward == 1.0
    assert trajectory.turns[0].end - trajectory.turns[0].start == 100


class Faulty(BaseTask):
    """A task that fails in the phase that the row names."""

    closed: ClassVar[list[str]] = []

    @classmethod
    def initialize_runtime(cls, instance: Any, instance_id: str) -> str:
        cls.fail(instance, "initialize_runtime")
        return instance_id

    @classmethod
    async def get_instruction(cls, instance: Any) -> list[Message]:
        cls.fail(instance, "get_instruction")
        return [Message(role="user", content="Go")]

    @classmethod
    def complete_runtime(cls, instance: Any, runtime: str) -> None:
        cls.fail(instance, "complete_runtime")

    @classmethod
    async def evaluate_result(cls, instance: Any, **kwargs: Any) -> Any:
        cls.fail(instance, "evaluate_result")
        return instance.get("reward", {"reward": True, "n_tests": 3})

    @classmethod
    async def close_runtime(cls, runtime: str) -> None:
        cls.closed.append(runtime)

    @classmethod
    def fail(cls, instance: Any, phase: str) -> None:
        if instance.get("fails") == phase:
            raise RuntimeError(f"{phase} failed")


FAULTY = f"{__name__}.Faulty"


@pytest.mark.parametrize(
    ("phase", "reason", "n_closed"),
    [
        ("initialize_runtime", "error_initialization", 0),
        ("get_instruction", "error_initialization", 2),
        ("complete_runtime", "error_runtime", 2),
        ("evaluate_result", "error_evaluation", 2),
    ],
)
async def test_a_failure_is_retried_then_invalid_and_closes_its_runtime(phase: str, reason: str, n_closed: int) -> None:
    Faulty.closed.clear()
    trajectory, _ = await play_one([call("finish", answer="x")], {"fails": phase, "prompt": []}, task=FAULTY)
    assert not trajectory.is_valid
    assert (trajectory.stop_reason, trajectory.n_attempts) == (reason, 2)
    assert f"{phase} failed" in str(trajectory.error)
    assert len(Faulty.closed) == n_closed


@pytest.mark.parametrize(("reward", "is_valid"), [(None, False), (float("nan"), False), ("1", False), (0.5, True)])
async def test_an_unknown_reward_is_not_zero(reward: Any, is_valid: bool) -> None:
    row = {"reward": reward, "prompt": []}
    trajectory, _ = await play_one([call("finish", answer="x")], row, task=FAULTY, n_retries=0)
    assert trajectory.is_valid == is_valid


async def test_a_task_may_report_metrics_and_a_truth_value() -> None:
    trajectory, _ = await play_one([call("finish", answer="x")], {"prompt": []}, task=FAULTY)
    assert trajectory.total_reward == 1.0
    assert trajectory.env_metrics["n_tests"] == 3


async def test_engine_failures_and_aborts_are_invalid() -> None:
    def fail(prompt: str, turn: int) -> str:
        raise EngineError("no memory")

    trajectory, engine = await play_one(fail)
    assert (trajectory.stop_reason, trajectory.error) == ("engine_error", "no memory")
    assert len(engine.requests) == 2


async def test_thoughts_are_removed_from_the_history_and_trained_on() -> None:
    replies = ["<think>I compute.</think>" + call("code_interpreter", code="1"), call("finish", answer="Paris")]
    trajectory, engine = await play_one(replies, remove_think_tokens=True)
    assert len(trajectory.segments) == 2
    assert "I compute" not in engine.prompts()[1]
    first = trajectory.segments[0]
    assert "I compute" in TOKENIZER.decode(first.response_ids)
    assert all(first.loss_mask)
    merged, engine = await play_one(replies, qwen3_acc_thinking=False)
    assert len(merged.segments) == 1
    assert "I compute" in engine.prompts()[1]


async def test_reminders_count_down() -> None:
    replies = ["no call"] * 3 + [call("finish", answer="Paris")]
    _, engine = await play_one(replies, enable_turn_reminder=True, max_iterations=4, early_step_threshold=2)
    prompts = engine.prompts()
    assert "Steps remaining: 3. Take at least 1 more steps before you finish." in prompts[1]
    assert "\n\nSteps remaining: 1. This is your last step: finish now.<|im_end|>" in prompts[3]


async def test_output_has_skyrl_agents_lists() -> None:
    def script(prompt: str, turn: int) -> str:
        return call("finish", answer="Paris" if "France" in prompt else "Rome")

    agents, _ = runner(script, num_trajectories=2, val_config={"num_trajectories": 1})
    other = {**ROW, "prompt": [{"role": "user", "content": "What is the capital of Spain?"}]}
    output = await agents.run([ROW, other])
    assert output["traj_rewards"] == output["rewards"] == [1.0, 1.0, 0.0, 0.0]
    assert output["traj_idx"] == [0, 0, 1, 1]
    assert output["episode_nums"] == [1] * 4
    assert output["is_last_episode"] == [True] * 4
    assert output["rollout_metrics"]["raw_reward"] == 0.5
    assert output["rollout_metrics"]["num_all_resolved"] == output["rollout_metrics"]["num_none_resolved"] == 1.0
    assert output["rollout_metrics"]["tool_name/finish"] == 4.0
    assert all(len(a) == len(b) for a, b in zip(output["response_ids"], output["loss_masks"], strict=True))
    assert len((await agents.run([ROW, other], val_mode=True))["traj_rewards"]) == 2
    await agents.close()


async def test_an_invalid_trajectory_is_in_no_mean() -> None:
    agents, _ = runner([call("finish", answer="x")], task=FAULTY, num_trajectories=1, n_retries=0)
    output = await agents.run([{"fails": "evaluate_result"}, {"reward": 0.5}])
    assert output["traj_rewards"] == [None, 0.5]
    assert output["rollout_metrics"]["raw_reward"] == 0.5
    assert output["rollout_metrics"]["error_evaluation"] == 0.5
    await agents.close()


def test_batches_of_several_kinds_become_rows() -> None:
    assert to_rows([ROW]) == [ROW]
    extras = {key: value for key, value in ROW.items() if key != "prompt"}
    lists = GeneratorInput(prompts=[ROW["prompt"]], env_classes=[None], env_extras=[extras])  # type: ignore[typeddict-item]
    assert to_rows(lists) == [ROW]
    with pytest.raises(DataError, match="the input batch is of the type int; pass a list of rows"):
        to_rows(3)


class Recorded(BaseTask):
    """A task that counts how many trajectories are in each phase."""

    n_now: ClassVar[dict[str, int]] = {}
    n_max: ClassVar[dict[str, int]] = {}
    envs: ClassVar[list[Any]] = []

    @classmethod
    async def enter(cls, phase: str) -> None:
        cls.n_now[phase] = cls.n_now.get(phase, 0) + 1
        cls.n_max[phase] = max(cls.n_max.get(phase, 0), cls.n_now[phase])
        await asyncio.sleep(0.01)
        cls.n_now[phase] -= 1

    @classmethod
    async def initialize_runtime(cls, env: Any) -> Any:
        await cls.enter("initialize")
        cls.envs.append(env)
        return env or "runtime"

    @classmethod
    def get_instruction(cls) -> list[Message]:
        return [Message(role="user", content="Go")]

    @classmethod
    async def complete_runtime(cls) -> None:
        await cls.enter("generate")

    @classmethod
    async def evaluate_result(cls) -> float:
        await cls.enter("evaluate")
        return 1.0


@pytest.mark.parametrize("kind", ["async_pipeline", "async_batch", "async_fix_pool"])
async def test_limits_of_dispatchers_hold_across_concurrent_calls(kind: str) -> None:
    Recorded.n_now, Recorded.n_max, Recorded.envs = {}, {}, []
    dispatcher: dict[str, Any] = {"type": kind, "max_parallel_agents": 4, "max_eval_parallel_agents": 2}
    if kind == "async_fix_pool":
        dispatcher["envs"] = ("a", "b", "c")
    agents, _ = runner(
        [call("finish", answer="x")], task=f"{__name__}.Recorded", num_trajectories=8, dispatcher=dispatcher
    )
    outputs = await asyncio.gather(agents.run([{}]), agents.run([{}]))
    assert [output["traj_rewards"] for output in outputs] == [[1.0] * 8] * 2
    limit = 3 if kind == "async_fix_pool" else 4
    assert Recorded.n_max["generate"] <= limit
    assert Recorded.n_max["initialize"] <= limit
    assert Recorded.n_max["evaluate"] <= 2
    assert set(Recorded.envs) == ({"a", "b", "c"} if kind == "async_fix_pool" else {None})
    await agents.close()


async def test_cancelled_trajectories_close_their_runtimes() -> None:
    Faulty.closed.clear()
    started = asyncio.Event()

    class Hanging(ScriptedEngine):
        async def generate(self, requests: Any) -> Any:
            started.set()
            await asyncio.sleep(3600)

    cfg = AgentConfig.model_validate({"task": FAULTY, "tools": ("finish",)})
    agents = AutoAgentRunner.from_task(cfg, Hanging(TOKENIZER, []), TOKENIZER)
    running = asyncio.create_task(agents.run([{}]))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(Faulty.closed) >= 1
    await agents.close()
