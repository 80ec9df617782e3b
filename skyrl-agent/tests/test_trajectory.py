"""Trajectories that fail, hang or end early: they are retried, then invalid, and close their runtimes."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest
from agent_kit.engines import tool_call
from agent_kit.trajectories import new_runner, play_one

from skyrl_agent import BaseTask
from skyrl_train.errors import EngineError
from skyrl_train.types import Message

FINISH = [tool_call("finish", answer="Paris")]


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
        match instance.get("grader"):
            case "cancels itself":
                raise asyncio.CancelledError
            case "hangs":
                await asyncio.sleep(3600)
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
    trajectory, _ = await play_one(FINISH, {"fails": phase}, task=FAULTY)
    assert not trajectory.is_valid
    assert (trajectory.stop_reason, trajectory.n_attempts) == (reason, 2)
    assert f"{phase} failed" in str(trajectory.error)
    assert len(Faulty.closed) == n_closed


@pytest.mark.parametrize(("reward", "is_valid"), [(None, False), (float("nan"), False), ("1", False), (0.5, True)])
async def test_an_unknown_reward_is_not_zero(reward: Any, is_valid: bool) -> None:
    trajectory, _ = await play_one(FINISH, {"reward": reward}, task=FAULTY, n_retries=0)
    assert trajectory.is_valid == is_valid


async def test_a_task_may_report_metrics_and_a_truth_value() -> None:
    trajectory, _ = await play_one(FINISH, {}, task=FAULTY)
    assert trajectory.total_reward == 1.0
    assert trajectory.env_metrics["n_tests"] == 3


@pytest.mark.parametrize(
    ("grader", "message"), [("hangs", "did not return within 0.2 s"), ("cancels itself", "CancelledError")]
)
async def test_a_grader_that_hangs_or_cancels_itself_ends_only_its_trajectory(grader: str, message: str) -> None:
    trajectory, _ = await play_one(FINISH, {"grader": grader}, task=FAULTY, task_timeout=0.2, n_retries=0)
    assert trajectory.stop_reason == "error_evaluation"
    assert message in str(trajectory.error)


async def test_engine_failures_are_retried_then_invalid() -> None:
    def fail(prompt: str, turn: int) -> str:
        raise EngineError("no memory")

    trajectory, engine = await play_one(fail)
    assert (trajectory.stop_reason, trajectory.error) == ("engine_error", "no memory")
    assert len(engine.requests) == 2


async def test_a_prompt_longer_than_the_context_is_named_and_not_retried() -> None:
    trajectory, engine = await play_one(FINISH, context_length=100)
    assert (trajectory.stop_reason, trajectory.n_attempts) == ("prompt_too_long", 1)
    assert "and the engine reads 100, those of the reply included" in str(trajectory.error)
    assert not engine.requests


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


async def test_a_row_without_a_column_is_invalid_alone() -> None:
    agents = new_runner(FINISH, FAULTY, data={"instance_key": "extra.instance"}, n_retries=0)
    output = await agents.run([{"extra": {"instance": {}}}, {"other": 1}])
    assert output["traj_rewards"] == [1.0] * 8 + [None] * 8
    assert set(output["stop_reasons"][8:]) == {"error_initialization"}
    await agents.close()


class WritesToInstance(BaseTask):
    """A task that writes into its instance, and collects nothing, as tasks of SkyRL-Agent do."""

    @classmethod
    def initialize_runtime(cls, *args: Any, **kwargs: Any) -> None:
        seen = kwargs["instance"]["seen"]
        seen["n"] = seen.get("n", 0) + 1

    @classmethod
    def get_instruction(cls, *args: Any, **kwargs: Any) -> list[Message]:
        return [Message(role="user", content="Go")]

    @classmethod
    def complete_runtime(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    @classmethod
    async def evaluate_result(cls, *args: Any, **kwargs: Any) -> float:
        assert kwargs["result"] == "Paris"
        return float(kwargs["instance"]["seen"]["n"] == 1)


async def test_each_attempt_has_its_own_instance_and_nothing_collected_keeps_the_answer() -> None:
    row: dict[str, Any] = {"seen": {}}
    agents = new_runner(FINISH, f"{__name__}.WritesToInstance", num_trajectories=4)
    assert (await agents.run([row]))["traj_rewards"] == [1.0] * 4
    assert row == {"seen": {}}
    await agents.close()
