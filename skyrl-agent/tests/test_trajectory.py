"""Trajectories that fail, hang or end early: they are retried, then invalid, and close their runtimes."""

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pytest
from agent_kit.trajectories import FINISH, HELD, Held, SimpleTask, cancel_a_task, new_runner, play_one
from train_kit.processes import wait_until

from skyrl_agent import BaseAgent, Outcome
from skyrl_agent.agents.base import AgentContext
from skyrl_train.errors import EngineError
from skyrl_train.types import Message


class Faulty(SimpleTask):
    """A task that fails in the phase that the row names."""

    closed: ClassVar[list[str]] = []

    @classmethod
    def initialize_runtime(cls, instance: Any, instance_id: str) -> str:
        cls.fail(instance, "initialize_runtime")
        return instance_id

    @classmethod
    async def get_instruction(cls, instance: Any) -> list[Message]:
        cls.fail(instance, "get_instruction")
        return super().get_instruction()

    @classmethod
    def complete_runtime(cls, instance: Any, runtime: str) -> None:
        cls.fail(instance, "complete_runtime")

    @classmethod
    async def evaluate_result(cls, instance: Any, **kwargs: Any) -> Any:
        cls.fail(instance, "evaluate_result")
        match instance.get("grader"):
            case "cancels itself":
                raise asyncio.CancelledError
            case "exits":
                sys.exit(0)
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
    trajectory, _ = await play_one([FINISH], {"fails": phase}, task=FAULTY)
    assert not trajectory.is_valid
    assert (trajectory.stop_reason, trajectory.n_attempts) == (reason, 2)
    assert f"{phase} failed" in str(trajectory.error)
    assert len(Faulty.closed) == n_closed


@pytest.mark.parametrize(("reward", "is_valid"), [(None, False), (float("nan"), False), ("1", False), (0.5, True)])
async def test_an_unknown_reward_is_not_zero(reward: Any, is_valid: bool) -> None:
    trajectory, _ = await play_one([FINISH], {"reward": reward}, task=FAULTY, n_retries=0)
    assert trajectory.is_valid == is_valid


@pytest.mark.parametrize(
    ("grader", "message"),
    [("hangs", "took longer than 0.2 s"), ("cancels itself", "CancelledError"), ("exits", "SystemExit: 0")],
)
async def test_a_grader_that_hangs_or_ends_its_program_ends_only_its_trajectory(grader: str, message: str) -> None:
    trajectory, _ = await play_one([FINISH], {"grader": grader}, task=FAULTY, task_timeout=0.2, n_retries=0)
    assert trajectory.stop_reason == "error_evaluation"
    assert message in str(trajectory.error)


async def test_engine_failures_are_retried_then_invalid() -> None:
    def fail(prompt: str, turn: int) -> str:
        raise EngineError("no memory")

    trajectory, engine = await play_one(fail)
    assert (trajectory.stop_reason, trajectory.error) == ("engine_error", "no memory")
    assert len(engine.requests) == 2


async def test_a_prompt_longer_than_the_context_is_named_and_not_retried() -> None:
    trajectory, engine = await play_one([FINISH], context_length=100)
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
    agents = new_runner([FINISH], FAULTY, data={"instance_key": "extra.instance"}, n_retries=0)
    output = await agents.run([{"extra": {"instance": {}}}, {"other": 1}])
    assert output["traj_rewards"] == [1.0] * 8 + [None] * 8
    assert output["rollout_metrics"]["raw_reward"] == 1.0  # the invalid ones are in no mean
    assert set(output["stop_reasons"][8:]) == {"error_initialization"}
    await agents.close()


class WritesToInstance(SimpleTask):
    """A task that writes into its instance, and collects nothing, as tasks of SkyRL-Agent do."""

    @classmethod
    def initialize_runtime(cls, *args: Any, **kwargs: Any) -> None:
        seen = kwargs["instance"]["seen"]
        seen["n"] = seen.get("n", 0) + 1

    @classmethod
    def complete_runtime(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    @classmethod
    async def evaluate_result(cls, *args: Any, **kwargs: Any) -> float:
        assert kwargs["result"] == "Paris"
        return float(kwargs["instance"]["seen"]["n"] == 1)


async def test_each_attempt_has_its_own_instance_and_nothing_collected_keeps_the_answer() -> None:
    row: dict[str, Any] = {"seen": {}}
    agents = new_runner([FINISH], f"{__name__}.WritesToInstance", num_trajectories=4)
    assert (await agents.run([row]))["traj_rewards"] == [1.0] * 4
    assert row == {"seen": {}}
    await agents.close()


class Fatal(BaseException):
    """An error that `except Exception` does not catch. pytest and torch.distributed.checkpoint raise such errors."""


async def cancel_oneself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def raise_error(error: BaseException) -> None:
    raise error


class Fault(NamedTuple):
    """The end of an agent, and the error of its trajectory."""

    end: Callable[[], Any]  # its result, or an awaitable of it, is the agent's
    message: str


AGENT_FAULTS = {
    "constructor": Fault(lambda: None, "SystemExit: 0"),
    "exit": Fault(partial(sys.exit, 0), "SystemExit: 0"),
    "cancelled task": Fault(cancel_a_task, "CancelledError"),
    "cancels itself": Fault(cancel_oneself, "CancelledError"),
    "base error": Fault(partial(raise_error, Fatal("no")), "Fatal: no"),
    "group": Fault(partial(raise_error, BaseExceptionGroup("tasks", [Fatal("no")])), "BaseExceptionGroup"),
    "exit in a thread": Fault(partial(asyncio.to_thread, sys.exit, 0), "SystemExit: 0"),
    "stop iteration": Fault(partial(next, iter(())), "StopIteration"),
    "tuple": Fault(lambda: ("[FINISH]", None), "Unruly.run returned ('[FINISH]', None); return an Outcome"),
    "no reason": Fault(partial(Outcome, None), "Unruly.run returned Outcome(finish_reason=None"),  # type: ignore[arg-type]
    "empty reason": Fault(partial(Outcome, ""), "Unruly.run returned Outcome(finish_reason=''"),
    "hangs": Fault(lambda: asyncio.Event().wait(), "Unruly had no result after generator.trajectory_timeout=2 s"),
}


class Unruly(BaseAgent):
    """An agent that ends as the row says, in the first trajectory."""

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context)
        self.fault = self.instance["fault"] if context.trajectory_id.endswith("0") else None
        if self.fault == "constructor":
            sys.exit(0)

    async def run(self) -> Any:
        await self.chat.generate()
        if self.fault is None:
            return Outcome("[FINISH]")
        end = AGENT_FAULTS[self.fault].end()
        return await end if inspect.isawaitable(end) else end


@pytest.mark.parametrize("fault", AGENT_FAULTS)
async def test_an_agents_fault_ends_only_its_trajectory(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    Faulty.closed.clear()
    settings: dict[str, Any] = {"num_trajectories": 2, "n_retries": 0}
    if fault == "hangs":
        settings["trajectory_timeout"] = 2
    agents = new_runner(["hm"], FAULTY, (), agent_cls=f"{__name__}.Unruly", **settings)
    output = await agents.run([{"fault": fault}])
    await agents.close()
    reason = "trajectory_timeout" if fault == "hangs" else "error_runtime"
    assert output["traj_rewards"] == [None, 1.0]
    assert output["stop_reasons"] == [reason, "[FINISH]"]
    assert output["rollout_metrics"][reason] == 0.5
    assert AGENT_FAULTS[fault].message in caplog.text
    assert len(Faulty.closed) == 2


class SlowStart(SimpleTask):
    """A task whose blocking start returns when the test says so, long after its limit."""

    may_return: ClassVar[threading.Event]
    all_closed: ClassVar[threading.Event]
    started: ClassVar[list[object]]
    closed: ClassVar[list[object]]

    @classmethod
    def initialize_runtime(cls) -> object:
        cls.may_return.wait(60)
        cls.started.append(runtime := object())
        return runtime

    @classmethod
    def close_runtime(cls, runtime: object) -> Any:
        cls.closed.append(runtime)
        if len(cls.closed) == 2:
            cls.all_closed.set()


class SlowStartAsyncClose(SlowStart):
    """A `SlowStart` whose `close_runtime` is a coroutine function."""

    @classmethod
    async def close_runtime(cls, runtime: object) -> None:
        await asyncio.sleep(0)
        super().close_runtime(runtime)


@pytest.fixture(params=["SlowStart", "SlowStartAsyncClose"])
def slow_start(request: pytest.FixtureRequest) -> type[SlowStart]:
    SlowStart.may_return, SlowStart.all_closed = threading.Event(), threading.Event()
    SlowStart.started, SlowStart.closed = [], []
    task: type[SlowStart] = globals()[request.param]
    return task


@pytest.mark.parametrize("closes_first", [False, True], ids=["then_close", "close_first"])
async def test_a_runtime_that_starts_after_its_limit_is_closed(slow_start: type[SlowStart], closes_first: bool) -> None:
    task = f"{__name__}.{slow_start.__name__}"
    agents = new_runner([FINISH], task, num_trajectories=1, n_retries=1, task_timeout=0.1)
    output = await agents.run([{}])
    assert output["stop_reasons"] == ["error_initialization"]
    assert not SlowStart.closed
    if closes_first:
        await agents.close()
    SlowStart.may_return.set()
    assert await asyncio.to_thread(SlowStart.all_closed.wait, 60)
    assert set(SlowStart.closed) == set(SlowStart.started)
    await agents.close()


@pytest.mark.parametrize("how", ["times out", "is cancelled"])
async def test_tools_that_are_created_too_late_are_closed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s = 0.1 if how == "times out" else 60
    agents = new_runner([FINISH], FAULTY, (HELD, "finish"), num_trajectories=1, n_retries=0, tool_timeout=limit_s)
    for name in ("may_start", "has_started"):
        monkeypatch.setattr(Held, name, threading.Event(), raising=False)
    monkeypatch.setattr(Held, "waits", True)
    monkeypatch.setattr(Held, "n_open", 0)
    running = asyncio.create_task(agents.run([{}]))
    assert await asyncio.to_thread(Held.has_started.wait, 60)
    if how == "is cancelled":
        running.cancel()
        await asyncio.sleep(0)
        Held.may_start.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    else:
        assert (await running)["stop_reasons"] == ["error_runtime"]
        Held.may_start.set()
    await asyncio.to_thread(wait_until, lambda: Held.n_open == 0)
    await agents.close()
